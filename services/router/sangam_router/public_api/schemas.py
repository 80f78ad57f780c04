"""The bodies of the public API, field by field: types and ranges, nothing more.

Fields that are not supported are dealt with before (``neutral``); what a valid body means is
decided after (``wishes``). Every error names its field.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sangam_core.decoding import CacheName, Unmasking
from sangam_core.errors import InvalidRequest
from sangam_router.public_api.neutral import CHAT, COMPLETION, MESSAGE, without_neutral

MAX_STOPS = 4

_MAX_NAME_CHARACTERS = 100
"""No field's name comes close to a longer one; comparing megabytes would stop the event loop."""

_RULE_WORDS = frozenset({*Unmasking.model_fields, "alg", "remasking"})
"""Parts of ``unmasking``, and what published generation loops call it."""


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(_Body):
    """``stream_options``.

    Attributes:
        include_usage: a last chunk without choices carries the usage.
        continuous_usage_stats: every chunk carries the usage so far.
        include_denoising: chunks carry every commit as it happens, out of order.
        include_timings: the chunk with the finish reason carries where the time went.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_denoising: bool | None = None
    include_timings: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(_Body):
    """What both endpoints take.

    Attributes:
        unmasking: a rule's name, or an object of ``rule`` and its parameter.
        confidence_threshold: short form of the threshold rule.
        ignore_eos: exactly ``max_tokens`` tokens come.
        cache: caching strategy.
        include_timings: a plain answer carries where the time went.
    """

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Any = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    unmasking: Any = None
    confidence_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    ignore_eos: bool | None = None
    cache: CacheName | None = None
    include_timings: bool | None = None


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``; its messages are read by ``read_messages``."""

    messages: Annotated[list[Any], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``; its prompt is read by ``read_prompts``."""

    prompt: Any
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class _Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Any
    name: str | None = None


BodyT = TypeVar("BodyT", bound=BaseModel)


def read_chat_body(body: object) -> ChatBody:
    """Check a chat body. ``InvalidRequest`` names the field."""
    return _validated(ChatBody, without_neutral(_object(body), CHAT))


def read_completion_body(body: object) -> CompletionBody:
    """Check a completion body. ``InvalidRequest`` names the field."""
    return _validated(CompletionBody, without_neutral(_object(body), COMPLETION))


def read_messages(messages: list[Any]) -> list[dict[str, str]]:
    """Messages as a chat template takes them: role, content as text, name where given.

    ``developer`` is OpenAI's newer word for ``system``, which templates know.
    """
    read: list[dict[str, str]] = []
    for index, item in enumerate(messages):
        where = f"messages.{index}."
        if not isinstance(item, dict):
            raise _wrong(f"messages.{index}", "must be an object with role and content")
        message = _validated(_Message, without_neutral(item, MESSAGE, where), where)
        role = "system" if message.role == "developer" else message.role
        entry = {"role": role, "content": _content(message.content, f"{where}content")}
        if message.name is not None:
            entry["name"] = message.name
        read.append(entry)
    return read


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "must be text or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequest(
                f"{where}.{index}: only parts of type 'text' are supported, not {kind!r}",
                param=f"{where}.{index}",
                code="unsupported_content",
            )
        text = part.get("text")
        if not isinstance(text, str) or set(part) - {"type", "text"}:
            raise _wrong(f"{where}.{index}", "must have 'type' and 'text' (a string), nothing else")
        texts.append(text)
    return "\n".join(texts)


def read_prompts(prompt: Any) -> list[str | list[int]]:
    """A completion's prompts: text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt) or all(_is_ids(item) for item in prompt):
            return list(prompt)
    raise _wrong(
        "prompt",
        "must be a string, a list of strings, a list of token ids, or a list of such lists; "
        "none of them empty",
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def read_stops(stop: Any) -> tuple[str, ...]:
    """Stop strings: none, one, or up to four."""
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(item, str) and item for item in stops)
    ):
        raise _wrong(
            "stop", f"must be a string or a list of up to {MAX_STOPS} strings, none of them empty"
        )
    return tuple(dict.fromkeys(stops))


def _wrong(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {problem}", param=param, code="invalid_value")


def _object(body: object) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return body


def _validated(kind: type[BodyT], body: Mapping[str, Any], where: str = "") -> BodyT:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        param = where + ".".join(str(part) for part in problem["loc"])
        match problem["type"]:
            case "extra_forbidden":
                raise InvalidRequest(
                    f"{param}: unknown field{_hint(kind, problem['loc'])}",
                    param=param,
                    code="unknown_parameter",
                ) from None
            case "missing":
                raise InvalidRequest(
                    f"{param} is missing", param=param, code="missing_required_parameter"
                ) from None
        shown = repr(problem["input"])
        raise InvalidRequest(
            f"{param}: {problem['msg']} (got {shown[:80]})", param=param, code="invalid_value"
        ) from None


def _hint(kind: type[BaseModel], place: Sequence[int | str]) -> str:
    """What somebody may have meant by a field that there is not."""
    name = str(place[-1])[:_MAX_NAME_CHARACTERS]
    is_top = len(place) == 1
    if is_top and issubclass(kind, GenerationBody) and name in _RULE_WORDS:
        return '; how masks are filled is said by unmasking, e.g. {"rule": "fixed", "steps": 8}'
    known = kind.model_fields if is_top else StreamOptions.model_fields
    close = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""
