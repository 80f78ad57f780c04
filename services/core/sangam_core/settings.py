"""How services read their settings: one frozen class, once, from ``SANGAM_`` variables.

Each service declares its own (each field with meaning, unit and reason), reads it in
``__main__`` with ``read_settings`` and passes it down. A bad value stops the start with one
line that names the variable, and never shows a secret.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin

from pydantic import SecretBytes, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from sangam_core.errors import ConfigurationError

ENV_PREFIX = "SANGAM_"

SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
"""What Kubernetes puts into ``NAME_PORT`` for each Service that there is."""


class ServiceSettings(BaseSettings):
    """Base of a service's settings. Collections are read as JSON."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a service reads, and the field it fills."""

    name: str
    field: FieldInfo


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def read_settings(kind: type[SettingsT]) -> SettingsT:
    """Read a service's settings from the environment.

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


def variables(kind: type[ServiceSettings]) -> Iterator[Variable]:
    """Every variable that a service reads, in the order of declaration."""
    for name, field in kind.model_fields.items():
        yield Variable(ENV_PREFIX + name.upper(), field)


def _problem(kind: type[ServiceSettings], details: ErrorDetails) -> str:
    """One validation error as ``VARIABLE: what is wrong (got ...)``."""
    name, *rest = details["loc"] or ("",)
    field = kind.model_fields.get(str(name))
    message = details["msg"].removeprefix("Value error, ")
    variable = ENV_PREFIX + str(name).upper() + "".join(f"[{part!r}]" for part in rest)
    if details["type"] == "missing":
        return f"{variable}: required, but not set"
    if not name:
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


def _not_json(kind: type[ServiceSettings]) -> list[str]:
    """The set variables that must be JSON and are not (pydantic-settings says less of them)."""
    collections = {
        variable.name
        for variable in variables(kind)
        if get_origin(variable.field.annotation) in (tuple, list, set, frozenset, dict)
        and NoDecode not in variable.field.metadata
    }
    problems = []
    for name, value in os.environ.items():
        if name.upper() not in collections:
            continue
        try:
            json.loads(value)
        except ValueError as error:
            problems.append(f'{name}: must be JSON, such as ["a", "b"] ({error})')
    return problems


def _is_secret(field: FieldInfo | None) -> bool:
    return field is not None and _holds_secret(field.annotation)


def _holds_secret(annotation: Any) -> bool:
    if annotation in (SecretStr, SecretBytes):
        return True
    return any(_holds_secret(part) for part in get_args(annotation))
