"""Where the real FlashInfer looks for libraries before it compiles; run by a test as a process."""

import sys

from flashinfer.jit import env
from flashinfer.version import __version__

from benchmarks.gpu.carried_kernels import archive_name, prebuilt_folder


def main() -> None:
    assert prebuilt_folder() == env.FLASHINFER_AOT_DIR
    assert archive_name("9.0a", 13).startswith(f"flashinfer-{__version__}-tvmffi-")
    sys.stdout.write("as expected\n")


if __name__ == "__main__":
    main()
