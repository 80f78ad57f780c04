"""``make bench-gpu-serving``: runs ``command`` in processes that a lost device may end."""

import sys

from benchmarks.gpu.supervised import SERVING_FOLDER, supervise

if __name__ == "__main__":
    module = "benchmarks.gpu.serving.command"
    sys.exit(supervise(module, sys.argv[1:], SERVING_FOLDER, "bench-gpu-serving"))
