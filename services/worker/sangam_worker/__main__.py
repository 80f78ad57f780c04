"""``python -m sangam_worker``: one worker process.

Reads the settings, gets the model and its kernels ready (``start``), serves until SIGTERM or
SIGINT, then drains and leaves; a second signal ends it at once. What cannot be started says so on
one line of standard error, with exit status 2, before a port opens.
"""

import asyncio
import contextlib
import os
import signal
import sys
from functools import partial

import structlog

from sangam_core.errors import ConfigurationError
from sangam_core.logs import configure_logging
from sangam_core.settings import read_settings
from sangam_core.unknown_settings import unknown_settings
from sangam_worker.engine import Engine
from sangam_worker.interpreter import favour_gpu_thread
from sangam_worker.process import Worker
from sangam_worker.progress import reports_for
from sangam_worker.settings import WorkerSettings
from sangam_worker.start import start_engine
from sangam_worker.transfer.choice import open_transport, prepare_transport

_log = structlog.get_logger(__name__)

EXIT_CONFIGURATION = 2
EXIT_THREAD_DEAD = 70
"""The GPU thread has ended by a bug; whoever supervises the process starts a new one."""

EXIT_HURRIED = 1
"""A second signal cut the drain short."""

_LOOK_SECONDS = 0.5


def main() -> int:
    """Run a worker; the process's exit status."""
    # The first process of a container has no default action: without this, SIGTERM would do
    # nothing while a large model loads.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        settings = read_settings(WorkerSettings)
        configure_logging(settings.log_level, settings.log_format, worker_id=settings.worker_id)
        for unknown in unknown_settings(os.environ):
            _log.warning("unknown_setting", variable=unknown.name, problem=unknown.problem)
        if settings.port_file is not None:  # of an earlier process, whose port may be another's
            settings.port_file.unlink(missing_ok=True)
        prepare_transport(settings)
        engine = start_engine(settings, reports_for(settings.log_format))
        return asyncio.run(_serve(settings, engine))
    except ConfigurationError as error:
        print(f"sangam-worker: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_CONFIGURATION


class _Signals:
    """The first signal asks to leave, a second one to hurry."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self.hurry = asyncio.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, self._came)

    def _came(self) -> None:
        (self.hurry if self.leave.is_set() else self.leave).set()


async def _serve(settings: WorkerSettings, engine: Engine) -> int:
    worker = Worker(settings, engine, partial(open_transport, settings))
    signals = _Signals()
    favour_gpu_thread()
    await worker.start()
    while not signals.leave.is_set():
        if not worker.loop.is_alive:
            await worker.presence.withdraw()  # routers need not wait for it to lapse
            await worker.stop()
            return EXIT_THREAD_DEAD
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.leave.wait(), _LOOK_SECONDS)
    leaving = asyncio.create_task(worker.leave())
    hurry = asyncio.create_task(signals.hurry.wait())
    await asyncio.wait([leaving, hurry], return_when=asyncio.FIRST_COMPLETED)
    if not leaving.done():
        return EXIT_HURRIED
    await leaving
    return 0


if __name__ == "__main__":
    sys.exit(main())
