"""Settings of the interpreter under which the GPU thread seldom waits for it.

Decides how long another thread may keep the interpreter, and what the garbage collector leaves
alone. Called by whoever runs a worker's loop as a process: ``__main__``, benchmarks.
"""

import gc
import sys

SWITCH_SECONDS = 0.0005
"""The interpreter's own 5 ms are most of an iteration: so long the event loop may keep a thread
waiting that has just seen its device finish. Shorter, and the two would spend their time on
taking turns."""


def favour_gpu_thread() -> None:
    """To be called once everything is loaded.

    What has been imported and loaded by then is not collected any more: looking through it takes
    100 ms, an iteration or more, whichever thread happens to allocate the object too many.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
