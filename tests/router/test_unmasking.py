"""Which fields of decoding go together: what would have to be ignored is refused by name."""

from itertools import product
from typing import Any

import pytest

from sangam_core.decoding import Decoding, Unmasking, UnmaskingRule
from sangam_core.errors import InvalidRequest
from sangam_core.rules import Family
from sangam_router.public_api.unmasking import check_filters, wanted_unmasking

VALUES = {"threshold": 0.5, "steps": 8, "factor": 2.0, "alg_temp": 0.1, "eps": 0.01}
CACHES = ("dual", "prefix", "none")
READ = {
    "threshold": {"threshold"},
    "fixed": {"steps"},
    "factor": {"factor"},
    "entropy": {"steps", "eps", "alg_temp"},
    "maskgit_plus": {"steps", "eps", "alg_temp"},
    "topk_margin": {"steps", "eps", "alg_temp"},
    "origin": {"steps", "eps"},
    "confidence_threshold": {"threshold", "steps"},
}


def refusal(
    unmasking: Any = None, confidence_threshold: float | None = None, cache: str = "dual"
) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        wanted_unmasking(unmasking, confidence_threshold, cache)
    assert refused.value.code == "invalid_value"
    return refused.value


def test_every_rule_is_in_the_table() -> None:
    assert set(READ) == {rule.value for rule in UnmaskingRule}
    assert set(VALUES) == set(Unmasking.model_fields) - {"rule"}


@pytest.mark.parametrize(("rule", "name", "cache"), [*product(READ, VALUES, CACHES)])
def test_a_parameter_is_read_or_refused_by_name(rule: str, name: str, cache: str) -> None:
    wish = {"rule": rule, name: VALUES[name]}
    is_unbudgeted = (rule, name) == ("confidence_threshold", "steps") and cache != "none"
    if name in READ[rule] and not is_unbudgeted:
        assert getattr(wanted_unmasking(wish, None, cache), name) == VALUES[name]
        return
    refused = refusal(wish, cache=cache)
    assert refused.param == f"unmasking.{name}"
    assert f"unmasking.{name} has no effect with rule '{rule}'" in str(refused)


def test_a_refused_parameter_comes_with_the_rules_that_read_it() -> None:
    assert str(refusal({"steps": 8})) == (
        "unmasking.steps has no effect with rule 'threshold'; leave it out, or use rule 'fixed' or "
        "'entropy' or 'maskgit_plus' or "
        "'topk_margin' or 'origin' or 'confidence_threshold'"
    )


def test_dreams_threshold_has_a_budget_of_steps_without_a_cache_only() -> None:
    told = str(refusal({"rule": "confidence_threshold", "steps": 8}, cache="prefix"))
    assert "cache 'prefix'" in told
    assert "set cache to 'none'" in told


@pytest.mark.parametrize(
    "unmasking", ["threshold", "fixed", {}, {"rule": "threshold"}, {"rule": "fixed", "steps": 8}]
)
def test_the_short_form_and_the_long_one_exclude_each_other(unmasking: Any) -> None:
    refused = refusal(unmasking, 0.5)
    assert refused.param == "confidence_threshold"
    assert "unmasking" in str(refused)


@pytest.mark.parametrize("wish", [None, {}, {"rule": None}, {"threshold": None, "steps": None}])
def test_fields_that_say_nothing_are_the_default(wish: Any) -> None:
    assert wanted_unmasking(wish, None, "dual") == Unmasking()


def test_an_unknown_part_is_told_what_there_is() -> None:
    told = str(refusal({"rule": "fixed", "colour": 1}))
    assert told == (
        "unmasking.colour: unknown field; there are rule, alg_temp, eps, factor, steps, threshold"
    )
    assert "(got 2)" in str(refusal({"threshold": 2}))


def check(family: Family, has_temperature: bool, rule: str = "threshold", **fields: Any) -> None:
    decoding = Decoding(unmasking=Unmasking(rule=UnmaskingRule(rule)), **fields)
    check_filters(family, decoding, has_temperature=has_temperature)


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 5)])
@pytest.mark.parametrize(
    ("family", "rule"),
    [*product(["llada"], ["threshold", "fixed", "factor"]), ("dream", "origin")],
)
def test_filters_of_a_draw_that_nobody_asked_for_are_refused(
    family: Family, rule: str, name: str, value: float
) -> None:
    with pytest.raises(InvalidRequest, match="set it too") as refused:
        check(family, False, rule, **{name: value})
    assert refused.value.param == name
    assert "temperature" in str(refused.value)
    check(family, True, rule, temperature=0.7, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 5)])
def test_filters_beside_a_stated_temperature_of_0_give_the_likeliest_token(
    name: str, value: float
) -> None:
    check("llada", True, temperature=0.0, **{name: value})


@pytest.mark.parametrize("rule", sorted(set(READ) - {"origin"}))
def test_dreams_filters_count_at_any_temperature(rule: str) -> None:
    check("dream", False, rule, top_p=0.9, top_k=5)


def test_filters_that_are_off_need_no_temperature() -> None:
    check("llada", False, top_p=1.0, top_k=0)
