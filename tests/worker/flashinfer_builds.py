"""What the real FlashInfer compiles, and when: its ninja files run, the compilers are stand-ins.

Run as a process of its own by ``test_kernels``. A stand-in writes what it was asked for and notes
that it was.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["FLASHINFER_WORKSPACE_BASE"] = tempfile.mkdtemp()
os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"

from flashinfer.jit import env

from sangam_worker import flashinfer_kernels
from sangam_worker.flashinfer_kernels import build, missing, wanted

FOLDER = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
COMPILED = FOLDER / "compiled"
_COMPILER = f"""#!{sys.executable}
import sys
from pathlib import Path
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.88")
    sys.exit()
out = Path(sys.argv[sys.argv.index("-o") + 1])
if "-MF" in sys.argv:
    source = sys.argv[sys.argv.index("-c") + 1]
    Path(sys.argv[sys.argv.index("-MF") + 1]).write_text(f"{{out}}: {{source}}\\n")
out.write_text("")
with open({str(COMPILED)!r}, "a") as noted:
    noted.write(out.name + "\\n")
"""


def install_compilers() -> None:
    """The stand-in is nvcc and the C++ compiler, which links."""
    nvcc = FOLDER / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(_COMPILER)
    nvcc.chmod(0o755)
    os.environ |= {"CUDA_HOME": str(FOLDER / "cuda"), "CXX": str(nvcc), "MAX_JOBS": "2"}


def num_compiled() -> int:
    return len(COMPILED.read_text().splitlines()) if COMPILED.exists() else 0


def used_first(kernels: list[Any]) -> None:
    """What FlashInfer does before it loads a library that did not come with it."""
    for kernel in kernels:
        kernel.build()


def check_what_a_worker_builds(kernels: list[Any]) -> None:
    names = [kernel.name for kernel in kernels]
    assert [kernel.name for kernel in missing(kernels)] == names
    build(kernels[2:])
    assert [kernel.name for kernel in missing(kernels)] == names[:2]
    build(missing(kernels))
    assert missing(kernels) == []
    num = num_compiled()
    assert num == sum(len(kernel.sources) + 1 for kernel in kernels), COMPILED.read_text()
    used_first(kernels)
    assert num_compiled() == num, COMPILED.read_text()

    os.environ["FLASHINFER_EXTRA_CUDAFLAGS"] = "-lineinfo"
    assert [kernel.name for kernel in missing(kernels)] == names, "made by another command"
    build(kernels)
    assert num_compiled() == 2 * num
    used_first(kernels)
    assert num_compiled() == 2 * num


def check_what_an_image_brings(kernels: list[Any]) -> None:
    flashinfer_kernels.main()
    shutil.rmtree(env.FLASHINFER_JIT_DIR)
    assert missing(kernels) == []
    aot_paths = [kernel.aot_path for kernel in kernels]
    assert all(path.exists() for path in aot_paths)

    env.FLASHINFER_WORKSPACE_DIR = env.FLASHINFER_WORKSPACE_DIR.with_name("80")
    assert missing(kernels) == kernels, "of no use to another GPU"
    assert not any(path == kernel.aot_path for path, kernel in zip(aot_paths, kernels, strict=True))


def main() -> None:
    install_compilers()
    env.FLASHINFER_AOT_DIR = FOLDER / "aot"
    kernels = wanted()
    check_what_a_worker_builds(kernels)
    check_what_an_image_brings(kernels)
    sys.stdout.write("as expected\n")
    shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
