"""``python -m sangam_router``: reads the settings, then serves until it is told to stop.

A setting, model or port that cannot be used ends it with one line and status 2.
"""

import asyncio
import os
import sys

import structlog

from sangam_core.errors import ConfigurationError
from sangam_core.logs import configure_logging
from sangam_core.settings import read_settings
from sangam_core.unknown_settings import unknown_settings
from sangam_router.router import Model, serve
from sangam_router.settings import RouterSettings

_log = structlog.get_logger(__name__)


def main() -> int:
    """Run the router; returns the exit status."""
    try:
        settings = read_settings(RouterSettings)
        configure_logging(settings.log_level, settings.log_format, router_id=settings.router_id)
        _warn(settings)
        asyncio.run(serve(settings, Model.read(settings)))
    except ConfigurationError as error:
        sys.stderr.write(f"sangam-router: {error}\n")
        return 2
    return 0


def _warn(settings: RouterSettings) -> None:
    """Tell of variables that do nothing, though whoever set them meant something by it."""
    for unknown in unknown_settings(os.environ):
        _log.warning("unknown_setting", variable=unknown.name, problem=unknown.problem)
    if os.environ.get("SANGAM_API_KEY") and not settings.api_keys:
        _log.warning(
            "open_to_all",
            variable="SANGAM_API_KEY",
            problem="it is the key that clients send; a router asks for keys by SANGAM_API_KEYS",
        )


if __name__ == "__main__":
    sys.exit(main())
