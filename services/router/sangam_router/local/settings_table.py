"""Settings tables for the services' READMEs, written from the settings classes.

Decides how a field reads as a table row. It knows no service: the classes are named on the
command line and imported by name, so that the router package still imports no worker.

    python -m sangam_router.local.settings_table services/router/README.md \\
        router=sangam_router.settings:RouterSettings

fills what stands between ``<!-- settings:router -->`` and ``<!-- /settings:router -->``. A test
holds the files against it.
"""

import sys
from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from inspect import isclass
from pathlib import Path

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from sangam_core.errors import ConfigurationError
from sangam_core.settings import ServiceSettings, Variable, variables

HEADER = ("| variable | default | meaning |", "|---|---|---|")


def settings_class(where: str) -> type[ServiceSettings]:
    """The settings class at ``module:Class``. ``ConfigurationError`` when there is none."""
    module, _, name = where.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{where}: cannot be imported ({error})") from error
    if not (isclass(found) and issubclass(found, ServiceSettings)):
        raise ConfigurationError(f"{where}: is no settings class")
    return found


def settings_table(kind: type[ServiceSettings]) -> str:
    """A markdown table of every variable, in the order of declaration.

    Raises:
        ConfigurationError: a field has no meaning written down.
    """
    return "\n".join([*HEADER, *(_row(variable) for variable in variables(kind))])


def with_table(text: str, name: str, table: str) -> str:
    """The text with the table between its markers. ``ConfigurationError`` without both markers."""
    start, stop = f"<!-- settings:{name} -->", f"<!-- /settings:{name} -->"
    if text.count(start) != 1 or text.count(stop) != 1 or text.index(stop) < text.index(start):
        raise ConfigurationError(f"needs {start} and, behind it, {stop}, once each")
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(stop)
    return f"{before}{start}\n{table}\n{stop}{after}"


def _row(variable: Variable) -> str:
    meaning = " ".join((variable.field.description or "").split())
    if not meaning:
        raise ConfigurationError(f"{variable.name}: has no meaning written down")
    cells = (f"`{variable.name}`", _default(variable), meaning.replace("``", "`"))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(variable: Variable) -> str:
    """The default as it would be set; a made-up one is told by the meaning."""
    field = variable.field
    if field.default_factory is not None:
        return "made up"
    default = field.default
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, bool):
        default = str(default).lower()
    return "" if default in (None, "", ()) else f"`{default}`"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite a file's tables: ``FILE NAME=MODULE:CLASS ...``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) < 2 or not all("=" in pair for pair in arguments[1:]):
        sys.stderr.write("usage: settings_table FILE NAME=MODULE:CLASS ...\n")
        return 2
    path = Path(arguments[0])
    try:
        text = path.read_text(encoding="utf-8")
        for pair in arguments[1:]:
            name, _, where = pair.partition("=")
            text = with_table(text, name, settings_table(settings_class(where)))
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 1
    path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
