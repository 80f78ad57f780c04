"""Which lengths the paper's two traces have, made up from the statistics of its Table 1.

The paper's own filtered traces are not public; what is published of them is median, P99 and
standard deviation of prompt and output. Decides the ranges, the order (independent requests, or
sessions whose successive requests resemble each other) and the seed's meaning. The distribution
is ``entropy``'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from sangam_core.errors import ConfigurationError
from sangam_loadtest.traces.entropy import LengthStatistics, fitted_masses, lengths_at
from sangam_loadtest.traces.request import TraceRequest

_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class SyntheticTrace:
    """One trace of Table 1; ``mask_buffer_tokens`` is the L that the paper runs it with."""

    prompt: LengthStatistics
    output: LengthStatistics
    mask_buffer_tokens: int


SHAREGPT = SyntheticTrace(
    prompt=LengthStatistics(median=795, p99=2007, std=596, low=4, high=2048),
    output=LengthStatistics(median=266, p99=874, std=206, low=1, high=1024),
    mask_buffer_tokens=1024,
)
ARXIV = SyntheticTrace(
    prompt=LengthStatistics(median=2827, p99=3923, std=890, low=64, high=4096),
    output=LengthStatistics(median=162, p99=360, std=73, low=1, high=512),
    mask_buffer_tokens=512,
)
SYNTHETIC_TRACES = {"sharegpt": SHAREGPT, "arxiv": ARXIV}
"""By name. Outputs end at the mask buffer L. ShareGPT prompts end at 2,048 tokens, just above
their P99, since no wider range leaves room for their standard deviation at that median."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """How much successive requests resemble each other.

    The defaults are the public ShareGPT lengths' own (rank correlation 0.54 and 0.43 of prompts and
    outputs at lag 1, none at lag 20, sessions of 6 turns): ``loadtest/README.md`` says how found.

    Attributes:
        mean_turns: turns of a session, geometrically distributed.
        prompt_correlation, output_correlation: of a session's successive turns (of their Gaussian
            ranks), falling off as a power of the distance.
    """

    mean_turns: float = 6.0
    prompt_correlation: float = 0.65
    output_correlation: float = 0.55

    def __post_init__(self) -> None:
        if self.mean_turns < 1:
            raise ConfigurationError(f"mean_turns must be at least 1, not {self.mean_turns}")
        for name in ("prompt_correlation", "output_correlation"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be in [0, 1), not {getattr(self, name)}")


@lru_cache(maxsize=16)
def _fitted(known: LengthStatistics) -> NDArray[np.float64]:
    return fitted_masses(known)


def synthetic_requests(
    trace: SyntheticTrace, seed: int, sessions: Sessions | None = None
) -> Iterator[TraceRequest]:
    """An endless trace; the same seed gives the same requests. Statistics do not depend on
    ``sessions``, only the order does. Prompt and output of one request are independent, as they
    are in the public files (correlation 0.01 to 0.04)."""
    prompt_ranks, output_ranks = _ranks(seed, "prompt", sessions), _ranks(seed, "output", sessions)
    while True:
        prompts = lengths_at(_fitted(trace.prompt), trace.prompt.low, next(prompt_ranks))
        outputs = lengths_at(_fitted(trace.output), trace.output.low, next(output_ranks))
        for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
            yield TraceRequest(prompt, output)


def _ranks(seed: int, part: str, sessions: Sessions | None) -> Iterator[NDArray[np.float64]]:
    """Chunks of quantiles, uniform over [0, 1), correlated within sessions where asked for.

    Prompts and outputs begin their sessions at the same requests: a generator seeded alike says
    where.
    """
    is_output = part == "output"
    own, starts = np.random.default_rng([seed, is_output]), np.random.default_rng([seed, 2])
    if sessions is None:
        while True:
            yield own.random(_CHUNK)
    correlation = sessions.output_correlation if is_output else sessions.prompt_correlation
    spread = (1 - correlation**2) ** 0.5
    to_rank = NormalDist().cdf
    last = float(own.standard_normal())
    while True:
        is_start = starts.random(_CHUNK) < 1 / sessions.mean_turns
        noise = own.standard_normal(_CHUNK)
        ranks = np.empty(_CHUNK)
        for index in range(_CHUNK):
            fresh = float(noise[index])
            last = fresh if is_start[index] else correlation * last + spread * fresh
            ranks[index] = to_rank(last)
        yield np.minimum(ranks, np.nextafter(1.0, 0.0))
