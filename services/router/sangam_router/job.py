"""What the public API asks of the driver, and what the driver tells it: plain data.

One ``Job`` is one answer (one choice of one prompt). No I/O, no decisions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from sangam_core.decoding import Commit, Decoding
from sangam_core.geometry import Geometry

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to generate.

    Attributes:
        request_id: unique over the fleet.
        prompt_ids: token ids of the prompt, without any mask.
        geometry: prompt and mask buffer; L may exceed ``max_tokens``.
        max_tokens: the answer is cut there.
        stops: stop strings.
        arrival_seconds: wall-clock time of arrival, the request's order in every queue.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    geometry: Geometry
    decoding: Decoding
    max_tokens: int
    arrival_seconds: float
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Denoised:
    """A commit as it happened: its block and pass, and the commit itself."""

    block: int
    step: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class Delta:
    """What one pass added.

    Attributes:
        text: text that has become certain, in order; may be empty.
        num_tokens: tokens of the answer so far (settled ones, within ``max_tokens``).
        denoised: every commit of the pass, wherever it lies.
    """

    text: str
    num_tokens: int
    denoised: tuple[Denoised, ...] = ()


Emit = Callable[[Delta], None]
"""Takes a delta at once and never blocks: a slow client must not hold a worker's pages."""


@dataclass(slots=True)
class Timings:
    """Where a request's time went, in seconds, summed over its blocks.

    Attributes:
        queueing_seconds: all waiting: the sum of the two that follow.
        prefill_queueing_seconds: waiting for a place for prefills and, there, for the token budget.
        decode_queueing_seconds: of prefilled blocks, waiting for a place on a decode worker, for it
            to reserve their pages and, their KV there, for joining its decodes.
        decode_seconds: from a prefill's end, or from joining the decodes of another worker, to the
            end of the last pass that counted.
        num_steps: passes whose commits counted.
        placements: for each block, the ids of the workers that it ran on, in order.
        commit_counts: for each block, tokens committed by each pass that counted, in order.
    """

    latency_seconds: float = 0.0
    first_token_seconds: float | None = None
    queueing_seconds: float = 0.0
    prefill_queueing_seconds: float = 0.0
    decode_queueing_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    transfer_seconds: float = 0.0
    num_blocks: int = 0
    num_steps: int = 0
    num_retries: int = 0
    placements: list[list[str]] = field(default_factory=list)
    commit_counts: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    """How an answer ended. Its text and tokens went out as deltas."""

    finish_reason: FinishReason
    num_tokens: int
    timings: Timings
