"""How services read their settings: one frozen tree, once, from ``SANGAM_`` variables.

Each service declares its own tree (each field with meaning, unit and reason), reads it in
``__main__`` with ``read_settings`` and passes it down. A bad value stops the start with one
line that names the variable, and never shows a secret.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import isclass
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, SecretBytes, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from sangam_core.errors import ConfigurationError

ENV_PREFIX = "SANGAM_"
ENV_NESTED_DELIMITER = "__"

SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
"""What Kubernetes puts into ``NAME_PORT`` for each Service that there is."""


class ServiceSettings(BaseSettings):
    """Base of a service's settings tree.

    Nested groups are read as ``SANGAM_GROUP__FIELD``, collections as JSON.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_NESTED_DELIMITER,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )


class SettingsGroup(BaseModel):
    """Base of a nested group: a variable of the group that is none of its fields is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a settings tree reads, and the field it fills."""

    name: str
    field: FieldInfo


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def read_settings(kind: type[SettingsT]) -> SettingsT:
    """Read a settings tree from the environment.

    Raises:
        ConfigurationError: naming every variable that is missing or bad, on one line.
    """
    try:
        return kind()
    except ValidationError as error:
        problems = [_problem(kind, details) for details in error.errors(include_url=False)]
    except SettingsError as error:
        problems = _not_json(kind) or [str(error)]
    raise ConfigurationError("; ".join(problems))


def variables(kind: type[BaseModel], prefix: str = ENV_PREFIX) -> Iterator[Variable]:
    """Every variable that a settings tree reads, groups flattened, in the order of declaration."""
    for name, field in kind.model_fields.items():
        variable = prefix + name.upper()
        group = _group(field)
        if group is None:
            yield Variable(variable, field)
        else:
            yield from variables(group, variable + ENV_NESTED_DELIMITER)


def _group(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isclass(kind) and issubclass(kind, BaseModel) else None


def _problem(kind: type[BaseModel], details: ErrorDetails) -> str:
    """One validation error as ``VARIABLE: what is wrong (got ...)``."""
    names: list[str] = []
    model: type[BaseModel] | None = kind
    field: FieldInfo | None = None
    rest = list(details["loc"])
    while rest and model is not None:
        name = str(rest.pop(0))
        names.append(name)
        field = model.model_fields.get(name)
        model = None if field is None else _group(field)
    message = details["msg"].removeprefix("Value error, ")
    variable = ENV_PREFIX + ENV_NESTED_DELIMITER.join(names).upper()
    variable += "".join(f"[{part!r}]" for part in rest)
    if details["type"] == "missing":
        return f"{variable}: required, but not set"
    if details["type"] == "extra_forbidden":
        return f"{variable}: there is no such setting"
    if not names:
        return message
    if details["type"] in ("bool_parsing", "bool_type"):
        message = "must be true or false"
    given = details["input"]
    if isinstance(given, str) and SERVICE_ADDRESS.match(given):
        message += (
            "; Kubernetes sets it for a Service of that name unless enableServiceLinks is false"
        )
    if isinstance(given, str | int | float | None) and not _is_secret(field):
        return f"{variable}: {message} (got {given!r})"
    return f"{variable}: {message}"


def _not_json(kind: type[BaseModel]) -> list[str]:
    """The set variables that must be JSON and are not (pydantic-settings names the group only)."""
    collections = {
        variable.name
        for variable in variables(kind)
        if get_origin(variable.field.annotation) in (tuple, list, set, frozenset, dict)
        and NoDecode not in variable.field.metadata
    }
    groups = {
        ENV_PREFIX + name.upper()
        for name, field in kind.model_fields.items()
        if _group(field) is not None
    }
    problems = []
    for name, value in os.environ.items():
        if name.upper() not in collections | groups:
            continue
        try:
            json.loads(value)
        except ValueError as error:
            form = 'such as ["a", "b"]' if name.upper() in collections else "or set its fields"
            problems.append(f"{name}: must be JSON, {form} ({error})")
    return problems


def _is_secret(field: FieldInfo | None) -> bool:
    return field is not None and _holds_secret(field.annotation)


def _holds_secret(annotation: Any) -> bool:
    if annotation in (SecretStr, SecretBytes):
        return True
    return any(_holds_secret(part) for part in get_args(annotation))
