"""Groups of options that several commands share, each said once: as a frozen dataclass.

Decides how a group becomes options of a command and the command's options the group; which
groups there are is ``options``'. Typer wants every option spelt out in a command's signature, so
``spread_options`` makes that signature. Called where a command is defined.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses are spread into one option a field.

    Such a parameter needs a default: an instance, whose values are the options' defaults, so
    that commands can differ in them. Options keep the order of parameters and fields.

    Raises:
        ValueError: two options have the same name.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            options += _options_of(kind, parameter.default)
        else:
            options.append(_option(parameter.name, parameter.default, kind))

    @wraps(command)
    def spread(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{item.name: values.pop(item.name) for item in fields(kind)})
        command(**values)

    spread.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    spread.__annotations__ = {option.name: option.annotation for option in options}
    return spread


def _options_of(kind: type[Any], defaults: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        _option(item.name, getattr(defaults, item.name), hints[item.name]) for item in fields(kind)
    ]


def _option(name: str, default: Any, kind: Any) -> inspect.Parameter:
    # By keyword only: an option without a default may then follow one with.
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
