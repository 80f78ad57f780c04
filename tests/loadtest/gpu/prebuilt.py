"""Kernels that are carried, from ``pack`` to the real FlashInfer that finds them.

Run as a process of its own by ``test_carried_kernels``; the compilers are stand-ins.
"""

import shutil
import sys

from tests.worker.flashinfer_builds import FOLDER, env, install_compilers

from benchmarks.gpu.carried_kernels import archive_name, main, prebuilt_folder, unpack
from sangam_worker.flashinfer_kernels import missing, wanted


def check() -> None:
    assert prebuilt_folder() == env.FLASHINFER_AOT_DIR
    install_compilers()
    toolkit, wheels = FOLDER / "cuda", FOLDER / "wheels"
    for name in ("include", "lib"):
        (toolkit / name).mkdir()
    (toolkit / "lib" / "libcudart.so.13").touch()
    main(["pack", str(wheels), str(toolkit)])
    archive = wheels / archive_name("9.0a", 13)
    shutil.rmtree(env.FLASHINFER_JIT_DIR)
    env.FLASHINFER_AOT_DIR = FOLDER / "aot"
    kernels = [*wanted(), *wanted(64)]
    assert missing(kernels) == kernels
    unpack(archive, env.FLASHINFER_AOT_DIR)
    assert missing(kernels) == []


if __name__ == "__main__":
    check()
    sys.stdout.write("as expected\n")
    shutil.rmtree(FOLDER)
