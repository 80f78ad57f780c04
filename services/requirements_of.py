"""Print what an image installs: the project's requirements with those of some extras.

The images install these before the code is there, so that a changed line of code leaves the
dependencies' layer as it is. Standard library only.

    python requirements_of.py pyproject.toml worker gpu
"""

import sys
import tomllib
from pathlib import Path


def requirements_of(pyproject: Path, extras: list[str]) -> list[str]:
    """Requirements as they stand in the file; ``KeyError`` for an extra that is not there."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements_of(Path(sys.argv[1]), sys.argv[2:])) + "\n")
