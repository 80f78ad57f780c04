"""What is simulated: workers and roles, budgets, thresholds, and what a block costs.

Decides names and checks of a configuration ("5P3C"), nothing of time. Read by ``fleet``,
``worker`` and ``driver``; made by the command, the sweeps and the reproduction.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sangam_core.admission import ADMISSION_POLICIES, DEFICIT
from sangam_core.errors import ConfigurationError
from sangam_core.geometry import DEFAULT_BLOCK_LENGTH
from sangam_core.placement import PlacementPolicy, Role
from sangam_core.placements import HYBRID, PLACEMENTS
from sangam_worker.scheduler import UNBOUNDED

_LETTERS = {"P": Role.PREFILL, "C": Role.COLOCATED, "D": Role.DECODE}
_SPLIT = re.compile(r"(?:\d+[PCD])+")
_PART = re.compile(r"(\d+)([PCD])")
DEFAULT_TAU_TOKENS = {Role.PREFILL: 8192, Role.COLOCATED: 1024, Role.DECODE: 1024}
"""The worker's own defaults; a test holds them against its settings."""


PAPER = "paper"
"""The paper's system, by its name in the cost model's table."""
_TRANSFERRED_DECODE_SHARE = 0.75
_MAX_BATCH_BLOCKS = 256


def transferred_decode_share(system: str) -> float:
    """The worker's setting in a system; the paper's has no such rule."""
    return math.inf if system == PAPER else _TRANSFERRED_DECODE_SHARE


def max_batch_blocks(system: str) -> int:
    """The worker's setting in a system; the paper's batches end where its pages do."""
    return UNBOUNDED if system == PAPER else _MAX_BATCH_BLOCKS


@dataclass(frozen=True, slots=True)
class Split:
    """How many workers have which role.

    Attributes:
        counts: by role; roles without workers are left out.
    """

    counts: Mapping[Role, int]

    @classmethod
    def parse(cls, text: str) -> "Split":
        """``8C``, ``4P4D``, ``5P3C``, in the paper's notation.

        Raises:
            ConfigurationError: it is not of this form, or could not serve.
        """
        written = text.strip().upper()
        if not _SPLIT.fullmatch(written):
            raise ConfigurationError(
                f"split {text!r}: must name counts and roles (P prefill, C colocated, D decode), "
                "such as 8C, 4P4D or 5P3C"
            )
        counts: dict[Role, int] = {}
        for number, letter in _PART.findall(written):
            counts[_LETTERS[letter]] = counts.get(_LETTERS[letter], 0) + int(number)
        if not any(counts.values()):
            raise ConfigurationError(f"split {text!r}: it has no worker; say how many, as in 8C")
        return cls({role: number for role, number in counts.items() if number})

    def __post_init__(self) -> None:
        roles = set(self.counts)
        if not any(role.can_prefill for role in roles):
            raise ConfigurationError(f"split {self}: no worker could prefill; add P or C")
        if not any(role.can_decode for role in roles):
            raise ConfigurationError(f"split {self}: no worker could decode; add D or C")

    @property
    def num_workers(self) -> int:
        """Of all roles."""
        return sum(self.counts.values())

    def roles(self) -> list[Role]:
        """The role of each worker."""
        return [role for role, number in self.counts.items() for _ in range(number)]

    def __str__(self) -> str:
        return "".join(
            f"{self.counts[role]}{letter}"
            for letter, role in _LETTERS.items()
            if role in self.counts
        )


@dataclass(frozen=True, slots=True)
class System:
    """A deployment to simulate.

    Attributes:
        total_pages: KV pages of each worker.
        tau_tokens: token budget of an iteration, by role (Algorithm 1).
        theta_tokens: overflow threshold (Algorithm 2); ``inf`` never overflows for load.
        transferred_decode_share: as the worker's setting; ``inf`` switches the rule off, as in
            the paper.
        mask_buffer_tokens: L of every request; None rounds each answer up to whole blocks.
        is_batch_one: a worker takes one request at a time (the paper's baseline, section 3.3).
        block_length: positions of a block.
        placement, admission: policies by name (``sangam_core.placements``, ``.admission``).
        max_blocks_per_decoder: as the router's setting.
        max_batch_blocks: as the worker's setting; by default pages alone bound a batch, as in the
            reproduction.
    """

    split: Split
    total_pages: int
    tau_tokens: Mapping[Role, int] = field(default_factory=lambda: dict(DEFAULT_TAU_TOKENS))
    theta_tokens: float = math.inf
    is_overflow_allowed: bool = True
    transferred_decode_share: float = _TRANSFERRED_DECODE_SHARE
    mask_buffer_tokens: int | None = None
    is_batch_one: bool = False
    block_length: int = DEFAULT_BLOCK_LENGTH
    placement: str = HYBRID
    max_blocks_per_decoder: float = math.inf
    admission: str = DEFICIT
    max_batch_blocks: int = UNBOUNDED

    def __post_init__(self) -> None:
        if self.total_pages < 1:
            raise ConfigurationError(f"a worker needs KV pages, not {self.total_pages}")
        for role, tau in self.tau_tokens.items():
            if tau < 1:
                raise ConfigurationError(f"tau of role {role} must be at least 1, not {tau}")
        if self.max_batch_blocks < 1:
            raise ConfigurationError(f"a batch needs a block, not {self.max_batch_blocks}")
        if not self.max_blocks_per_decoder > 0:  # nan too
            raise ConfigurationError(
                f"the bound on blocks must be positive, not {self.max_blocks_per_decoder}"
            )
        if not self.theta_tokens > 0:
            raise ConfigurationError(f"theta must be positive, not {self.theta_tokens}")
        if self.placement not in PLACEMENTS:
            raise ConfigurationError(
                f"placement {self.placement!r}: use one of {', '.join(PLACEMENTS)}"
            )
        if self.admission not in ADMISSION_POLICIES:
            raise ConfigurationError(
                f"admission {self.admission!r}: use one of {', '.join(ADMISSION_POLICIES)}"
            )
        if self.mask_buffer_tokens is not None and (
            self.mask_buffer_tokens < 1 or self.mask_buffer_tokens % self.block_length
        ):
            raise ConfigurationError(
                f"L ({self.mask_buffer_tokens}) must be whole blocks of {self.block_length}"
            )

    @property
    def placement_policy(self) -> PlacementPolicy:
        """Which placement, and its parameters."""
        return PlacementPolicy(
            self.theta_tokens, self.is_overflow_allowed, self.placement, self.max_blocks_per_decoder
        )
