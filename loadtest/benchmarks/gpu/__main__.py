"""``make bench-gpu``: runs ``command`` in processes that a lost device may end."""

import sys

from benchmarks.gpu.supervised import PASSES_FOLDER, supervise

if __name__ == "__main__":
    sys.exit(supervise("benchmarks.gpu.command", sys.argv[1:], PASSES_FOLDER, "bench-gpu"))
