"""How a client wants its masks filled: the fields of that, and which of them go together.

Decides what is refused because it would have to be ignored: parameters of another rule, two fields
for one thing, filters of a draw that does not take place. Which rules a model has is ``rules``' in
the core. Called by ``wishes``.
"""

from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from sangam_core.decoding import Decoding, Unmasking, UnmaskingRule
from sangam_core.errors import InvalidRequest
from sangam_core.rules import Family, keeps_kv

_SCHEDULED = frozenset({"steps", "eps", "alg_temp"})
_PARAMETERS: dict[UnmaskingRule, frozenset[str]] = {
    UnmaskingRule.THRESHOLD: frozenset({"threshold"}),
    UnmaskingRule.FIXED: frozenset({"steps"}),
    UnmaskingRule.FACTOR: frozenset({"factor"}),
    UnmaskingRule.ENTROPY: _SCHEDULED,
    UnmaskingRule.MASKGIT_PLUS: _SCHEDULED,
    UnmaskingRule.TOPK_MARGIN: _SCHEDULED,
    UnmaskingRule.ORIGIN: frozenset({"steps", "eps"}),
    UnmaskingRule.CONFIDENCE_THRESHOLD: frozenset({"threshold", "steps"}),
}
"""What each rule reads; anything else would be silently ignored."""

_NAMES = frozenset(Unmasking.model_fields) - {"rule"}


def wanted_unmasking(unmasking: Any, confidence_threshold: float | None, cache: str) -> Unmasking:
    """The rule that a body's fields ask for; without any, the threshold rule.

    Raises:
        InvalidRequest: naming the field that would have to be ignored.
    """
    if confidence_threshold is None:
        wanted = read_unmasking(unmasking)
    elif unmasking is None:
        wanted = Unmasking(threshold=confidence_threshold)
    else:
        raise InvalidRequest(
            "confidence_threshold is short for unmasking "
            f'{{"rule": "threshold", "threshold": {confidence_threshold:g}}}; give one of them',
            param="confidence_threshold",
            code="invalid_value",
        )
    is_dreams_own = wanted.rule is UnmaskingRule.CONFIDENCE_THRESHOLD
    if is_dreams_own and wanted.steps is not None and keeps_kv(cache):
        raise InvalidRequest(
            "unmasking.steps has no effect with rule 'confidence_threshold' and cache "
            f"{cache!r}, where each pass takes all that reach the threshold; leave it out, or set "
            "cache to 'none'",
            param="unmasking.steps",
            code="invalid_value",
        )
    return wanted


def check_filters(family: Family, decoding: Decoding, *, has_temperature: bool) -> None:
    """Refuse ``top_p`` and ``top_k`` where nothing is drawn because no temperature was asked for.

    A temperature of 0 that a client states is another thing: the likeliest token is what any
    nucleus gives then. Dream's filters raise confidences at any temperature, and so count unless
    the rule looks at none.
    """
    is_ranked = decoding.unmasking.rule is not UnmaskingRule.ORIGIN
    if has_temperature or (family == "dream" and is_ranked):
        return
    name = "top_p" if decoding.top_p < 1.0 else "top_k" if decoding.top_k > 0 else None
    if name is not None:
        raise InvalidRequest(
            f"{name} has no effect without temperature, which is 0 here unless it is set; set it "
            f"too (0 for the likeliest tokens), or leave {name} out",
            param=name,
            code="invalid_value",
        )


def read_unmasking(wish: Any) -> Unmasking:
    """An unmasking rule from its name, or from an object of ``rule`` and its parameter.

    Raises:
        InvalidRequest: naming the part that is wrong, e.g. ``unmasking.threshold``.
    """
    fields = {} if wish is None else {"rule": wish} if isinstance(wish, str) else wish
    if not isinstance(fields, dict):
        raise InvalidRequest(
            "unmasking must be a rule's name or an object such as "
            '{"rule": "threshold", "threshold": 0.9}',
            param="unmasking",
            code="invalid_value",
        )
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        rule = UnmaskingRule(given.get("rule", UnmaskingRule.THRESHOLD))
    except ValueError:
        known = ", ".join(UnmaskingRule)
        raise InvalidRequest(
            f"unmasking.rule: {given['rule']!r} is unknown; use one of {known}",
            param="unmasking.rule" if isinstance(wish, dict) else "unmasking",
            code="invalid_value",
        ) from None
    _check_parameters(rule, given)
    try:
        return Unmasking.model_validate({**given, "rule": rule}, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        param = "unmasking." + ".".join(str(part) for part in problem["loc"])
        is_unknown = problem["type"] == "extra_forbidden"
        message = (
            f"unknown field; there are rule, {', '.join(sorted(_NAMES))}"
            if is_unknown
            else f"{problem['msg']} (got {problem['input']!r:.80})"
        )
        raise InvalidRequest(f"{param}: {message}", param=param, code="invalid_value") from None


def _check_parameters(rule: UnmaskingRule, given: Collection[str]) -> None:
    for name in sorted(_NAMES.intersection(given) - _PARAMETERS[rule]):
        readers = " or ".join(
            repr(each.value) for each in UnmaskingRule if name in _PARAMETERS[each]
        )
        raise InvalidRequest(
            f"unmasking.{name} has no effect with rule {rule.value!r}; leave it out, or use rule "
            f"{readers}",
            param=f"unmasking.{name}",
            code="invalid_value",
        )
