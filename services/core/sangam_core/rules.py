"""Which ways of decoding a model family supports: one pure answer for router and worker.

Decides what is refused before a request is queued; the sampler carries out what is left
(``dllm-semantics`` section b). No torch.
"""

from typing import Literal

from sangam_core.decoding import Decoding, UnmaskingRule
from sangam_core.errors import InvalidRequest

Family = Literal["llada", "dream"]
"""Model families by name: they differ in which row predicts a position, and in their rules."""

LLADA_RULES = frozenset({UnmaskingRule.THRESHOLD, UnmaskingRule.FIXED, UnmaskingRule.FACTOR})
"""Fast-dLLM's rules for LLaDA; they run on Dream as well, after its forced first token."""

DREAM_RULES = frozenset(UnmaskingRule)
"""Dream runs its own algorithms and LLaDA's rules.

``threshold`` takes no token budget; ``confidence_threshold`` is Dream's own: the same with a
block cache, budgeted by ``steps`` without one.
"""

RANKED_RULES = frozenset(
    {UnmaskingRule.ENTROPY, UnmaskingRule.MASKGIT_PLUS, UnmaskingRule.TOPK_MARGIN}
)
"""The rules whose ranking ``alg_temp`` can turn into a draw."""


def check_decoding(family: Family, decoding: Decoding) -> None:
    """Refuse what the family's sampler cannot carry out.

    Raises:
        InvalidRequest: naming ``unmasking``: a Dream algorithm on LLaDA, or ``alg_temp`` with a
            rule that does not rank.
    """
    rule = decoding.unmasking.rule
    supported = LLADA_RULES if family == "llada" else DREAM_RULES
    if rule not in supported:
        raise InvalidRequest(
            f"unmasking: rule {rule.value!r} is one of Dream's; this model is {family}: use one "
            f"of {', '.join(sorted(supported))}",
            param="unmasking",
            code="invalid_value",
        )
    if decoding.unmasking.alg_temp and rule not in RANKED_RULES:
        raise InvalidRequest(
            f"unmasking: alg_temp has no effect with rule {rule.value!r}; leave it out, or use "
            f"one of {', '.join(sorted(RANKED_RULES))}",
            param="unmasking",
            code="invalid_value",
        )


def keeps_kv(cache: str) -> bool:
    """Whether a strategy holds pages between passes; else it runs on colocated workers only."""
    return cache != "none"


def decodes_in_blocks(family: Family, cache: str) -> bool:
    """Whether the mask buffer is decoded block by block; else it is one single block.

    Dream without a cache knows no blocks: its geometry is one block over the whole buffer.
    """
    return family != "dream" or keeps_kv(cache)
