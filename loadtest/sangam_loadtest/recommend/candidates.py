"""Which deployments are worth trying on so many GPUs: splits, and the settings of each mode.

Decides the grids and which settings mean the same in a mode (those are tried once); how candidates
are compared is ``halving``'s. Pure. Called by ``search``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import TypeVar

from sangam_core.admission import DEFICIT
from sangam_core.errors import ConfigurationError
from sangam_core.placement import Role
from sangam_core.placements import DECODE_AWARE, HYBRID, SHORTEST_DELAY
from sangam_loadtest.simulator.system import DEFAULT_TAU_TOKENS, Split
from sangam_loadtest.system_options import PolicyOptions

_DEFAULT_TAU = DEFAULT_TAU_TOKENS[Role.COLOCATED]
_DEFAULT_PREFILL_TAU = DEFAULT_TAU_TOKENS[Role.PREFILL]
_DEFAULT_THETA = 8192.0
_MAX_FRACTIONS = 8
Value = TypeVar("Value")


class Mode(StrEnum):
    """How roles are shared out."""

    COLOCATED = "colocated"
    HYBRID = "hybrid"
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment: how many workers of which role, and their settings."""

    split: str
    policy: PolicyOptions

    @property
    def mode(self) -> Mode:
        """Whether all workers do both, none does, or some do."""
        return mode_of(self.split)

    @property
    def num_gpus(self) -> int:
        """A GPU a worker."""
        return Split.parse(self.split).num_workers

    @property
    def settings(self) -> dict[str, float | str]:
        """What an operator sets, by the words of tables; only what means something in its mode."""
        counts, policy = Split.parse(self.split).counts, self.policy
        found: dict[str, float | str] = {}
        if Role.PREFILL not in counts or Role.COLOCATED in counts:
            found["tau"] = policy.tau
        if Role.PREFILL in counts:
            found["prefill tau"] = policy.tau_prefill
        if self.mode is Mode.HYBRID:
            found["theta"] = policy.theta
        if policy.placement != HYBRID:
            found["placement"] = policy.placement
        if policy.admission != DEFICIT:
            found["admission"] = policy.admission
        if policy.max_blocks != math.inf:
            found["blocks a decoder"] = policy.max_blocks
        return found

    def __str__(self) -> str:
        told = ", ".join(f"{name} {_plain(value)}" for name, value in self.settings.items())
        return f"{self.split} ({told})"


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def mode_of(split: str) -> Mode:
    """The mode of a split."""
    roles = set(Split.parse(split).counts)
    if Role.COLOCATED not in roles:
        return Mode.DISAGGREGATED
    return Mode.COLOCATED if roles == {Role.COLOCATED} else Mode.HYBRID


@dataclass(frozen=True, slots=True)
class Choices:
    """What is tried. A single value fixes a setting.

    Attributes:
        splits: in the paper's notation.
        colocated_taus, hybrid_taus: budgets of colocated workers, by mode: a tau so large that
            every prefill is admitted at once makes sense where no prefill worker takes them.
        prefill_taus: budgets of prefill workers.
        thetas: overflow thresholds of hybrids; ``inf`` never overflows for load.
    """

    splits: tuple[str, ...]
    colocated_taus: tuple[int, ...] = (512, 1024, 2048, 4096, 16384)
    hybrid_taus: tuple[int, ...] = (512, 1024, 2048, 4096)
    prefill_taus: tuple[int, ...] = (_DEFAULT_PREFILL_TAU, 2048)
    thetas: tuple[float, ...] = (4096.0, _DEFAULT_THETA, 16384.0, math.inf)
    placements: tuple[str, ...] = (HYBRID, SHORTEST_DELAY)
    admissions: tuple[str, ...] = (DEFICIT,)
    max_blocks: tuple[float, ...] = (math.inf,)
    mask_buffer: int | None = None

    def coarse(self) -> list[Candidate]:
        """Every split, with the settings that decide between splits and defaults for the rest."""
        tau = _preferred(self.colocated_taus, _DEFAULT_TAU)
        narrow = replace(
            self,
            colocated_taus=(tau,),
            hybrid_taus=(_preferred(self.hybrid_taus, _DEFAULT_TAU),),
            thetas=(_preferred(self.thetas, _DEFAULT_THETA),),
            max_blocks=self.max_blocks[:1],
        )
        return [c for split in self.splits for c in narrow.of_split(split)]

    def of_split(self, split: str) -> Iterator[Candidate]:
        """A split with every combination of settings that differ in effect; defaults first."""
        mode = mode_of(split)
        has_prefill, is_hybrid = mode is not Mode.COLOCATED, mode is Mode.HYBRID
        taus = {
            Mode.COLOCATED: self.colocated_taus,
            Mode.HYBRID: self.hybrid_taus,
            Mode.DISAGGREGATED: (_preferred(self.hybrid_taus, _DEFAULT_TAU),),
        }[mode]
        placements = dict.fromkeys(_effective(placement, mode) for placement in self.placements)
        for placement, admission, prefill_tau, tau, theta, blocks in product(
            placements,
            self.admissions,
            self.prefill_taus if has_prefill else self.prefill_taus[:1],
            taus,
            self.thetas if is_hybrid else (_DEFAULT_THETA,),
            self.max_blocks,
        ):
            yield Candidate(
                split,
                PolicyOptions(
                    tau=tau,
                    tau_prefill=prefill_tau,
                    theta=theta,
                    overflow=is_hybrid,
                    mask_buffer=self.mask_buffer,
                    placement=placement,
                    max_blocks=blocks,
                    admission=admission,
                ),
            )


def _effective(placement: str, mode: Mode) -> str:
    """The placement that does the same in a mode: they differ where there is a choice."""
    matters = {SHORTEST_DELAY: Mode.HYBRID, DECODE_AWARE: Mode.COLOCATED}.get(placement)
    return HYBRID if matters is not None and matters is not mode else placement


def _preferred(values: Sequence[Value], default: Value) -> Value:
    return default if default in values else values[0]


def splits_of(num_gpus: int) -> tuple[str, ...]:
    """Splits of so many GPUs: colocated, and every share of prefill workers in eighths.

    Above eight GPUs not every number of prefill workers: the search looks between the best.

    Raises:
        ConfigurationError: there is no GPU.
    """
    if num_gpus < 1:
        raise ConfigurationError(f"there must be at least one GPU, not {num_gpus}")
    steps = min(num_gpus, _MAX_FRACTIONS)
    numbers = sorted({round(num_gpus * step / steps) for step in range(1, steps)})
    prefill = [number for number in numbers if 0 < number < num_gpus]
    return (
        f"{num_gpus}C",
        *(f"{number}P{num_gpus - number}C" for number in prefill),
        *(f"{number}P{num_gpus - number}D" for number in prefill),
    )


def neighbours(split: str, tried: Sequence[str]) -> list[str]:
    """Splits half way between one and those tried next to it, of the same mode; none between
    neighbours that differ by one worker."""
    own = _prefill_count(split)
    mode, letter = mode_of(split), split[-1]
    total = Split.parse(split).num_workers
    others = [_prefill_count(s) for s in tried if mode_of(s) is mode]
    below = max((n for n in others if n < own), default=own)
    above = min((n for n in others if n > own), default=own)
    found = sorted({(own + below) // 2, (own + above) // 2} - set(others))
    return [f"{n}P{total - n}{letter}" for n in found if 0 < n < total]


def _prefill_count(split: str) -> int:
    return Split.parse(split).counts.get(Role.PREFILL, 0)
