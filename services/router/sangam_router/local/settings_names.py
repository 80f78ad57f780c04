"""The names of all services' settings, written where every service can read them.

No service may import another's settings, and yet each has to know their names, to tell a mistyped
variable from a neighbour's (``sangam_core.unknown_settings``).

    python -m sangam_router.local.settings_names services/core/sangam_core/settings_names.txt \\
        sangam_router.settings:RouterSettings sangam_worker.settings:WorkerSettings

A test holds the file to the classes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from sangam_core.errors import ConfigurationError
from sangam_core.settings import variables
from sangam_router.local.settings_table import settings_class


def settings_names(places: Sequence[str]) -> str:
    """The variables of settings classes at ``module:Class``, sorted, one a line."""
    names = {each.name for where in places for each in variables(settings_class(where))}
    return "".join(f"{name}\n" for name in sorted(names))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file: ``FILE MODULE:CLASS ...``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) < 2:
        sys.stderr.write("usage: settings_names FILE MODULE:CLASS ...\n")
        return 2
    try:
        Path(arguments[0]).write_text(settings_names(arguments[1:]), encoding="ascii")
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
