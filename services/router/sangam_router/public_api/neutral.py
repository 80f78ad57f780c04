"""Fields of OpenAI's bodies that Sangam does not support, and the values under which it does not
matter.

Real clients send many of them without being asked (design section 7); a value that would change
the answer gets a 400 that names the field. Fields in neither table nor schema are unknown, which
the schemas refuse.
"""

from collections.abc import Mapping
from typing import Any

from sangam_core.errors import InvalidRequest

_NONE: tuple[Any, ...] = (None,)

COMMON: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": _NONE,
    "prompt_logprobs": _NONE,
    "truncate_prompt_tokens": _NONE,
    "structured_outputs": _NONE,
    "guided_json": _NONE,
    "guided_regex": _NONE,
    "guided_choice": _NONE,
    "guided_grammar": _NONE,
    "priority": (None, 0),
    "use_beam_search": (None, False),
    "best_of": (None, 1),
    "logit_bias": (None, {}),
    "stop_token_ids": (None, []),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "metadata": (None, {}),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "prompt_cache_key": _NONE,
    "prompt_cache_retention": _NONE,
}
"""Fields that both endpoints know; vLLM's come from its clients."""

CHAT: Mapping[str, tuple[Any, ...]] = {
    **COMMON,
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": _NONE,
    "prediction": _NONE,
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": _NONE,
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template_kwargs": (None, {}),
}

COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **COMMON,
    "logprobs": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
}

MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "refusal": _NONE,
    "tool_calls": (None, []),
    "function_call": _NONE,
    "audio": _NONE,
    "annotations": (None, []),
    "reasoning_content": (None, ""),
}
"""Fields of a message; clients send an answer's message back as it came."""


def without_neutral(
    body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], where: str = ""
) -> dict[str, Any]:
    """The body without unsupported fields that are neutral.

    Args:
        where: prefix of the field's name in errors, e.g. ``messages.0.``.

    Raises:
        InvalidRequest: one of them has a value that asks for something.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        neutral = table.get(name)
        if neutral is None:
            kept[name] = value
        elif not any(_is_same(value, other) for other in neutral):
            raise InvalidRequest(
                f"{where}{name} is not supported; leave it out",
                param=where + name,
                code="unsupported_parameter",
            )
    return kept


def _is_same(value: Any, neutral: Any) -> bool:
    """Equality that tells False from 0: ``logprobs: 0`` asks for something, 0.0 is 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
