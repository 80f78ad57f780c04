"""Writes tables of constants in the form that ``table`` reads.

Decides how they look; what is written, and the sources, are the caller's. Called by
``sangam loadtest fit``.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from sangam_core.errors import ConfigurationError
from sangam_loadtest.costs.table import BACKENDS


@dataclass(frozen=True, slots=True)
class Entry:
    """What is to be written of a table: ``[section.name]``, and where its values come from.

    Attributes:
        sources: by constant; all of them where the constants are a backend's name.
    """

    section: str
    name: str
    constants: Any
    sources: Mapping[str, str] = field(default_factory=dict)


def write_table(path: Path, heading: str, entries: Iterable[Entry]) -> None:
    """Write a table that ``read_table`` reads.

    Args:
        heading: comment at the top, one or several lines.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    backends = []
    for entry in entries:
        if entry.section == BACKENDS:
            backends.append(f"{_key(entry.name)} = {_quoted(entry.constants)}")
            continue
        lines += ["", f"[{entry.section}.{_key(entry.name)}]"]
        for item in fields(entry.constants):
            value = _spelled(item, getattr(entry.constants, item.name))
            source = _quoted(entry.sources[item.name])
            lines.append(f"{item.name} = {{ {value}, source = {source} }}")
    if backends:
        lines += ["", f"[{BACKENDS}]", *backends]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from error


def _spelled(item: Field[Any], value: float | str) -> str:
    if isinstance(value, str):
        return f"value = {_quoted(value)}"
    return f"value = {value:.5g}, unit = {_quoted(item.metadata['unit'])}"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """A string of TOML: JSON's escapes are its own."""
    return json.dumps(text)
