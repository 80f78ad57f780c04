"""Which decodings a family supports, and which decode block by block."""

import pytest

from sangam_core.decoding import Decoding, Unmasking, UnmaskingRule
from sangam_core.errors import InvalidRequest
from sangam_core.rules import Family, check_decoding, decodes_in_blocks

LLADA_RULES = ["threshold", "fixed", "factor"]
DREAM_ALGORITHMS = ["entropy", "maskgit_plus", "topk_margin", "origin", "confidence_threshold"]


def a_decoding(rule: str, alg_temp: float | None = None) -> Decoding:
    return Decoding(unmasking=Unmasking(rule=UnmaskingRule(rule), alg_temp=alg_temp))


@pytest.mark.parametrize("rule", LLADA_RULES)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_both_families_run_lladas_rules(family: Family, rule: str) -> None:
    check_decoding(family, a_decoding(rule))


@pytest.mark.parametrize("rule", DREAM_ALGORITHMS)
def test_dreams_algorithms_run_on_dream_only(rule: str) -> None:
    check_decoding("dream", a_decoding(rule))
    with pytest.raises(InvalidRequest, match=rule) as refused:
        check_decoding("llada", a_decoding(rule))
    assert refused.value.param == "unmasking"


@pytest.mark.parametrize("rule", ["entropy", "maskgit_plus", "topk_margin"])
def test_alg_temp_goes_with_the_rules_that_rank(rule: str) -> None:
    check_decoding("dream", a_decoding(rule, alg_temp=0.5))


@pytest.mark.parametrize("rule", ["threshold", "fixed", "factor", "origin", "confidence_threshold"])
def test_alg_temp_is_refused_where_it_would_do_nothing(rule: str) -> None:
    check_decoding("dream", a_decoding(rule, alg_temp=0.0))
    with pytest.raises(InvalidRequest, match="alg_temp"):
        check_decoding("dream", a_decoding(rule, alg_temp=0.5))


def test_only_dream_without_a_cache_decodes_its_whole_buffer_at_once() -> None:
    whole = {
        (family, cache)
        for family in ("llada", "dream")
        for cache in ("dual", "prefix", "none")
        if not decodes_in_blocks(family, cache)  # type: ignore[arg-type]
    }
    assert whole == {("dream", "none")}
