"""Reads tables of constants: TOML, every value with its unit and its source.

Decides the sections, that each value is there, is a number within its bounds and in its unit, and
that what a table lacks is taken from the shipped one, entry by entry. Which constants a section
has ``constants`` says, ``table_file`` writes them. Called by ``model``, ``capacity`` and ``fit``.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

from sangam_core.errors import ConfigurationError
from sangam_loadtest.costs.constants import (
    AttentionConstants,
    LaunchConstants,
    LinkConstants,
    ProductConstants,
    SamplingConstants,
    SmallConstants,
    SystemConstants,
)
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.shapes import ModelShape

SHIPPED = "constants.toml"

KINDS: dict[str, type[Any]] = {
    "gpus": Gpu,
    "products": ProductConstants,
    "head": ProductConstants,
    "attention": AttentionConstants,
    "small": SmallConstants,
    "sampling": SamplingConstants,
    "launch": LaunchConstants,
    "links": LinkConstants,
    "systems": SystemConstants,
}
"""What a section's tables hold: ``[products.bf16]`` is a ``ProductConstants``."""

BACKENDS = "backends"
"""The one section of another form: which attention backend serves which model."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Section(Generic[T]):
    """The tables of one section by name."""

    source: str
    name: str
    entries: Mapping[str, T]

    def __getitem__(self, entry: str) -> T:
        try:
            return self.entries[entry]
        except KeyError:
            known = ", ".join(self.entries)
            hint = " (sangam loadtest fit adds one)" if self.name == "gpus" else ""
            raise ConfigurationError(
                f"{self.source}: there is no [{self.name}.{entry}]; known: {known}{hint}"
            ) from None


@dataclass(frozen=True, slots=True)
class Table:
    """All constants: sections by the names in ``KINDS``, and the backend of each model."""

    source: str
    gpus: Section[Gpu]
    products: Section[ProductConstants]
    head: Section[ProductConstants]
    attention: Section[AttentionConstants]
    small: Section[SmallConstants]
    sampling: Section[SamplingConstants]
    launch: Section[LaunchConstants]
    links: Section[LinkConstants]
    systems: Section[SystemConstants]
    backends: Section[str]

    def backend_of(self, shape: ModelShape) -> str:
        """The attention that serves a model; one not named goes by its kind, mha or gqa."""
        is_named = shape.name in self.backends.entries
        return self.backends[shape.name if is_named else shape.attention_kind]

    def with_entry(self, section: str, entry: str, constants: Any) -> "Table":
        """This table with one entry changed, or more by one."""
        old: Section[Any] = getattr(self, section)
        entries = {**old.entries, entry: constants}
        changed: dict[str, Any] = {section: replace(old, entries=entries)}
        return replace(self, **changed)


def read_table(path: Path | None = None) -> Table:
    """The shipped table, or with the entries at ``path`` in the place of those of their names.

    Raises:
        ConfigurationError: the file cannot be read, or a value is absent, unknown, of another
            unit or out of bounds; the text names file, line and field.
    """
    if path is None:
        return _shipped_table()
    return _checked(Table(source=str(path), **_complete(_read(str(path)), _shipped())))


@cache
def _shipped() -> dict[str, Section[Any]]:
    return _read(str(files("sangam_loadtest.costs") / SHIPPED))


@cache
def _shipped_table() -> Table:
    return _checked(Table(source=SHIPPED, **_complete(_shipped(), {})))


def _checked(table: Table) -> Table:
    for model, backend in table.backends.entries.items():
        if backend not in table.attention.entries:
            known = ", ".join(table.attention.entries)
            problem = f"names {backend!r}, but there is no [attention.{backend}]; known: {known}"
            raise ConfigurationError(f"{table.source}: {BACKENDS}.{model} {problem}")
    return table


def _complete(read: dict[str, Section[Any]], fallback: dict[str, Section[Any]]) -> dict[str, Any]:
    sections = {}
    for name in [*KINDS, BACKENDS]:
        given, shipped = read.get(name), fallback.get(name)
        if given is None or shipped is None:
            sections[name] = given or shipped
        else:
            sections[name] = replace(given, entries={**shipped.entries, **given.entries})
    return sections


def _read(source: str) -> dict[str, Section[Any]]:
    try:
        text = Path(source).read_text(encoding="utf-8")
        raw = tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"{source}: {error.strerror}") from error
    except ValueError as error:  # bad TOML (its text names line and column), or not UTF-8
        raise ConfigurationError(f"{source}: not a table of constants: {error}") from error
    reader = _Reader(source, text.splitlines())
    return {name: reader.section(name, value) for name, value in raw.items()}


@dataclass(frozen=True, slots=True)
class _Reader:
    source: str
    lines: list[str]

    def section(self, name: str, raw: Any) -> Section[Any]:
        if name not in KINDS and name != BACKENDS:
            known = ", ".join([*KINDS, BACKENDS])
            raise self.error((name,), f"is no section; there are: {known}")
        if not isinstance(raw, dict):
            raise self.error((name,), "must be a table")
        if name == BACKENDS:
            return Section(self.source, name, {k: self.backend(k, v) for k, v in raw.items()})
        kind = KINDS[name]
        return Section(self.source, name, {k: self.entry(kind, (name, k), raw[k]) for k in raw})

    def backend(self, model: str, raw: Any) -> str:
        if not isinstance(raw, str) or not raw:
            raise self.error((BACKENDS, model), f"must name an attention backend, not {raw!r}")
        return raw

    def entry(self, kind: type[Any], where: tuple[str, ...], raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise self.error(where, "must be a table")
        known = {item.name: item for item in fields(kind)}
        for name in raw:
            if name not in known:
                raise self.error((*where, name), f"is unknown; there are: {', '.join(known)}")
        for name in known:
            if name not in raw:
                raise self.error((*where, name), "is missing")
        return kind(**{n: self.value(item, (*where, n), raw[n]) for n, item in known.items()})

    def value(self, item: Field[Any], where: tuple[str, ...], raw: Any) -> float | str:
        if not isinstance(raw, dict) or not {"value", "source"} <= set(raw):
            raise self.error(where, "must be { value = ..., unit = ..., source = ... }")
        value = raw["value"]
        if not isinstance(raw["source"], str) or not raw["source"]:
            raise self.error(where, "must say its source")
        if choices := item.metadata.get("choices"):
            if value not in choices:
                raise self.error(where, f"must be one of {', '.join(choices)}, not {value!r}")
            return str(value)
        return self.number(item.metadata, where, value, raw.get("unit"))

    def number(
        self, bounds: Mapping[str, Any], where: tuple[str, ...], value: Any, unit: Any
    ) -> float:
        if unit != bounds["unit"]:
            raise self.error(where, f"must be in {bounds['unit']!r}, not {unit!r}")
        low, high = bounds["low"], bounds["high"]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise self.error(where, f"must be a number in {low:g} .. {high:g}, not {value!r}")
        return float(value)

    def error(self, where: tuple[str, ...], problem: str) -> ConfigurationError:
        line = self.line_of(where)
        place = f"{self.source}, line {line}" if line else self.source
        return ConfigurationError(f"{place}: {'.'.join(where)} {problem}")

    def line_of(self, where: tuple[str, ...]) -> int | None:
        """The line of a field, or else of the table that it is missing from."""
        places = self.places()
        for length in range(len(where), 0, -1):
            for path, line in places:
                if path[:length] == where[:length]:
                    return line
        return None

    def places(self) -> list[tuple[tuple[str, ...], int]]:
        """Every table and field with its line."""
        table: tuple[str, ...] = ()
        found = []
        for number, line in enumerate(self.lines, start=1):
            text = line.strip()
            if text.startswith("["):
                table = tuple(part.strip(' "') for part in text.strip("[] ").split(".", 1))
                found.append((table, number))
            elif "=" in text and not text.startswith("#"):
                found.append(((*table, text.split("=")[0].strip(' "')), number))
        return found
