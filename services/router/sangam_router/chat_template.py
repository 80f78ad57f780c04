"""Renders a dialogue with the model's chat template, as Hugging Face does, in a sandbox.

Decides the environment a template sees; which template, and what becomes of the text, is
``tokenizer``'s. Templates come from checkpoints, so they run in jinja2's immutable sandbox.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sangam_core.errors import ConfigurationError, InvalidRequest


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: jinja2 source as published in ``tokenizer_config.json`` or ``chat_template.jinja``.
        special_tokens: ``bos_token``, ``eos_token`` and so on, visible to the template.

    Raises:
        ConfigurationError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigurationError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a dialogue, ending in an assistant header.

        Raises:
            InvalidRequest: the template refuses the dialogue (a role or an order it cannot have).
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens
            )
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)
