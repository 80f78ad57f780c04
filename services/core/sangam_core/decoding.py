"""How the masks of a request are filled: unmasking rule, sampling, caching, end of answer.

Wire types only: the router validates a client's wishes into them, the worker's sampler carries
them out (``dllm-semantics`` section b). Nothing here computes.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WireModel(BaseModel):
    """Base of everything that crosses a process border: frozen, and strict about unknown fields.

    Infinite and undefined floats cross as themselves: pydantic's default would make a ``null``,
    which means something else (``Commit.confidence``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class UnmaskingRule(StrEnum):
    """Which of a pass's predictions are committed.

    The first three are Fast-dLLM's for LLaDA; the others are Dream's ``alg`` names.
    """

    THRESHOLD = "threshold"
    FIXED = "fixed"
    FACTOR = "factor"
    ENTROPY = "entropy"
    MASKGIT_PLUS = "maskgit_plus"
    TOPK_MARGIN = "topk_margin"
    ORIGIN = "origin"
    CONFIDENCE_THRESHOLD = "confidence_threshold"


STEPPED_RULES = frozenset(
    {
        UnmaskingRule.FIXED,
        UnmaskingRule.ENTROPY,
        UnmaskingRule.MASKGIT_PLUS,
        UnmaskingRule.TOPK_MARGIN,
        UnmaskingRule.ORIGIN,
    }
)
"""Rules with a schedule: they need ``steps`` (default: one pass a position)."""


class Unmasking(WireModel):
    """An unmasking rule with its parameter.

    Attributes:
        threshold: confidence from which a token commits (inclusive), for ``threshold`` and
            ``confidence_threshold``.
        steps: passes per block for the stepped rules (``None``: as many as block positions).
            Where a model decodes without blocks (Dream, cache ``none``) the whole mask buffer is
            one block.
        factor: Fast-dLLM's factor, for ``factor``.
        alg_temp: Dream's ``alg_temp``: positions are drawn from softmax(confidence / alg_temp);
            ``None`` or 0 ranks them.
        eps: end point of Dream's time schedule.
    """

    rule: UnmaskingRule = UnmaskingRule.THRESHOLD
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9
    steps: Annotated[int, Field(ge=1, le=65536)] | None = None
    factor: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    alg_temp: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    eps: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-3


class EosRule(StrEnum):
    """What an end token does.

    END: the request ends at the pass after which an EOS has no mask before it.
    IGNORE: nothing (load tests: exactly ``max_tokens`` tokens come).
    FILL: dInfer's early stop: everything behind the first EOS becomes EOS (golden cases only).
    """

    END = "end"
    IGNORE = "ignore"
    FILL = "fill"


class Decoding(WireModel):
    """Everything that decides a request's tokens, besides the model and the prompt.

    Attributes:
        cache: caching strategy by name (``dual``, ``prefix``, ``none``).
        temperature: 0 is greedy. For LLaDA Gumbel noise at this temperature, for Dream a
            categorical draw from the tempered distribution.
        top_p, top_k: Dream and LLaDA alike: filter before the draw; 1.0 and 0 are off.
        seed: noise is a function of (seed, block, step, position) alone, so that results depend
            neither on the batch nor on a restart.
        eos_ids: end tokens.
    """

    unmasking: Unmasking = Unmasking()
    cache: str = "dual"
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    eos_ids: tuple[int, ...] = ()
    eos_rule: EosRule = EosRule.END


class Commit(WireModel):
    """A mask that became a token: absolute position, token id, and the rule's confidence.

    ``confidence`` is ``None`` where the token was not predicted (dInfer's early stop fills it).
    """

    position: int
    token: int
    confidence: float | None = None


class Resume(WireModel):
    """Where a block that was lost mid-way goes on (design section 5, *Restart*).

    Attributes:
        step: passes whose commits the client has been sent; the next pass is number ``step``.
        initial_masks: masks in the block at its start (the fixed schedule's n).
        commits: everything committed in this block so far.
        carry: the unmasking rule's own state after ``step`` passes (Dream's token budget).
    """

    step: Annotated[int, Field(ge=0)]
    initial_masks: Annotated[int, Field(ge=1)]
    commits: tuple[Commit, ...] = ()
    carry: float = 0.0

    @model_validator(mode="after")
    def _commits_come_from_passes(self) -> Self:
        if self.step == 0 and self.commits:
            raise ValueError("resume.commits must be empty when resume.step is 0")
        return self


CacheName = Literal["dual", "prefix", "none"]
