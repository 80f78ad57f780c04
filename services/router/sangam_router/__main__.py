"""``python -m sangam_router``: reads the settings, then serves until it is told to stop.

A setting, model or port that cannot be used ends it with one line and status 2.
"""

import asyncio
import sys

from sangam_core.errors import ConfigurationError
from sangam_core.settings import read_settings
from sangam_router.log import configure_logging
from sangam_router.router import Model, serve
from sangam_router.settings import RouterSettings


def main() -> int:
    """Run the router; returns the exit status."""
    try:
        settings = read_settings(RouterSettings)
        configure_logging(settings.log_level, settings.log_format)
        asyncio.run(serve(settings, Model.read(settings)))
    except ConfigurationError as error:
        sys.stderr.write(f"sangam-router: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
