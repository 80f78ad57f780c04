"""What a GPU's memory is spent on, settled at the start: pure numbers in, a decision out.

Decides how many pages the KV pool gets, and refuses what cannot fit with the settings that would
help. ``sizing`` says what is needed, ``start`` asks and says the outcome in one line.
"""

from dataclasses import dataclass, replace

from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS

_FEWER_TOKENS = "lower SANGAM_MAX_SEQUENCE_TOKENS, SANGAM_MAX_BATCH_BLOCKS or the SANGAM_TAU_TOKENS"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU before the model is on it.

    Attributes:
        total_bytes: of the device. used_bytes: taken already, by the CUDA context of this process
            and by whatever else runs there.
    """

    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a worker takes beside its KV pool.

    Attributes:
        weights_bytes: of the model.
        activations_bytes: of the largest iteration, workspaces included.
        graphs_bytes: what captured graphs keep.
        transfers_bytes: buffers of KV transfers, made later.
    """

    weights_bytes: int
    activations_bytes: int
    graphs_bytes: int = 0
    transfers_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.weights_bytes + self.activations_bytes + self.graphs_bytes + self.transfers_bytes
        )


@dataclass(frozen=True, slots=True)
class PoolWish:
    """What the pool should be.

    Attributes:
        page_bytes: of one page in all layers.
        total_pages: as many and no more; ``None``: what is left.
        longest_tokens: a pool of what is left must hold one sequence of this length.
    """

    page_bytes: int
    total_pages: int | None
    longest_tokens: int

    @property
    def least_pages(self) -> int:
        """What the longest sequence needs."""
        return -(-self.longest_tokens // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The decision: ``total_pages`` pages, beside what ``needs`` says."""

    memory: DeviceMemory
    needs: MemoryNeeds
    page_bytes: int
    total_pages: int

    @property
    def left_bytes(self) -> int:
        """What nobody has: the share that was not to be used, and remainders."""
        pool_bytes = self.total_pages * self.page_bytes
        return (
            self.memory.total_bytes - self.memory.used_bytes - self.needs.total_bytes - pool_bytes
        )

    def taking(self, needs: MemoryNeeds) -> "MemoryBudget":
        """The same pool beside what was really taken."""
        return replace(self, needs=needs)

    def line(self) -> str:
        """The whole memory in one line, GB (10^9 bytes)."""
        needs = self.needs
        parts = [("in use before", self.memory.used_bytes), ("weights", needs.weights_bytes)]
        parts += [("graphs", needs.graphs_bytes)] if needs.graphs_bytes else []
        parts += [("activations", needs.activations_bytes)]
        parts += [("transfers", needs.transfers_bytes)] if needs.transfers_bytes else []
        spent = ", ".join(f"{name} {_gb(number)}" for name, number in parts)
        tokens = self.total_pages * PAGE_TOKENS
        return (
            f"GPU memory {_gb(self.memory.total_bytes)} GB: {spent}, "
            f"KV pool {_gb(self.total_pages * self.page_bytes)} ({self.total_pages:,} pages = "
            f"{tokens / 1000:,.0f}k tokens), left {_gb(self.left_bytes)}"
        )


def settle(
    memory: DeviceMemory, needs: MemoryNeeds, pool: PoolWish, utilization: float
) -> MemoryBudget:
    """Give the pool its pages.

    Args:
        utilization: share of the whole memory that may be in use in the end.

    Raises:
        ConfigurationError: something does not fit; it says what takes how much, and which setting
            to change.
    """
    share_bytes = int(memory.total_bytes * utilization)
    left = share_bytes - memory.used_bytes - needs.total_bytes
    if pool.total_pages is not None:
        if pool.total_pages * pool.page_bytes > left:
            raise ConfigurationError(_pool_too_large(memory, needs, pool, utilization, left))
        return MemoryBudget(memory, needs, pool.page_bytes, pool.total_pages)
    if pool.least_pages * pool.page_bytes > left:
        raise ConfigurationError(_does_not_fit(memory, needs, pool, utilization))
    return MemoryBudget(memory, needs, pool.page_bytes, left // pool.page_bytes)


def _pool_too_large(
    memory: DeviceMemory, needs: MemoryNeeds, pool: PoolWish, utilization: float, left: int
) -> str:
    most = max(0, left) // pool.page_bytes
    fix = f"ask for at most {most:,} pages" if most else _fix(memory, needs, utilization)
    return (
        f"SANGAM_TOTAL_PAGES or SANGAM_POOL_BYTES: {pool.total_pages:,} pages are "
        f"{_gb((pool.total_pages or 0) * pool.page_bytes)} GB, but {_spent(memory, needs)} leave "
        f"{_gb(max(0, left))} of {_share(memory, utilization)}; {fix}"
    )


def _does_not_fit(
    memory: DeviceMemory, needs: MemoryNeeds, pool: PoolWish, utilization: float
) -> str:
    longest_bytes = pool.least_pages * pool.page_bytes
    return (
        f"SANGAM_GPU_MEMORY_UTILIZATION: {_share(memory, utilization)} cannot hold "
        f"{_spent(memory, needs)} and {_gb(longest_bytes)} GB of KV for one sequence of "
        f"{pool.longest_tokens:,} tokens; {_fix(memory, needs, utilization)}"
    )


def _fix(memory: DeviceMemory, needs: MemoryNeeds, utilization: float) -> str:
    """What would help, the most likely first."""
    free_bytes = int(memory.total_bytes * utilization) - memory.used_bytes
    if needs.weights_bytes > memory.total_bytes * utilization:
        return "the weights alone are too large for this GPU"
    if needs.weights_bytes > free_bytes:
        return "end what else uses this GPU, or raise SANGAM_GPU_MEMORY_UTILIZATION"
    return f"{_FEWER_TOKENS} (activations), or raise SANGAM_GPU_MEMORY_UTILIZATION"


def _spent(memory: DeviceMemory, needs: MemoryNeeds) -> str:
    return (
        f"{_gb(memory.used_bytes)} GB in use before, {_gb(needs.weights_bytes)} of weights, "
        f"{_gb(needs.activations_bytes)} of activations, {_gb(needs.graphs_bytes)} of graphs, "
        f"{_gb(needs.transfers_bytes)} of transfers"
    )


def _share(memory: DeviceMemory, utilization: float) -> str:
    return f"{utilization:g} of {_gb(memory.total_bytes)} GB"


def _gb(number: int) -> str:
    return f"{number / 1e9:.1f}"
