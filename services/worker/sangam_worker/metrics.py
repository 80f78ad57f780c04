"""What a worker counts, as Prometheus metrics with the prefix ``sangam_worker_``.

Decides names, labels and buckets. The loop, the service and the transfers report happenings
through the methods; ``/metrics`` reads them with ``exposition``. Safe from any thread.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sangam_core.placement import Role
from sangam_worker.plan import Plan
from sangam_worker.tracking import LoopStatus

_ITERATION_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_GAP_BUCKETS = (0.0001, 0.0002, 0.0003, 0.0004, 0.0006, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
"""A gap of 0.4 ms is 5 % of an 8 ms iteration."""
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_PREFIX = "sangam_worker_"


class WorkerMetrics:
    """One worker's metrics, in a registry of their own (several workers fit one process)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._iterations = self._counter("iterations", "Iterations that ran.")
        self._iteration_failures = self._counter(
            "iteration_failures", "Iterations in which the engine failed."
        )
        self._iteration_seconds = self._histogram(
            "iteration_seconds", "Time of an iteration in the engine.", _ITERATION_BUCKETS
        )
        self._gap_seconds = self._histogram(
            "gap_seconds",
            "Of the time between two outcomes, what the device did not work.",
            _GAP_BUCKETS,
        )
        self._prefill_tokens = self._counter("prefill_tokens", "Rows of whole-sequence passes.")
        self._decode_tokens = self._counter("decode_tokens", "Rows of decode passes.")
        self._committed_tokens = self._counter("committed_tokens", "Masks that became tokens.")
        self._carried_tokens = self._gauge("carried_tokens", "Deficit S: budget carried over.")
        self._tau_tokens = self._gauge("tau_tokens", "Token budget of an iteration.")
        self._free_pages = self._gauge("free_pages", "KV pages that nobody holds.")
        self._total_pages = self._gauge("total_pages", "KV pages in the pool.")
        self._waiting = self._gauge("waiting_blocks", "Blocks whose whole-sequence pass waits.")
        self._running = self._gauge("running_blocks", "Blocks that decode in every iteration.")
        self._blocks_here = self._gauge("blocks", "Blocks on this worker, at any stage.")
        self._queue_seconds = self._histogram(
            "queue_seconds", "From a prefill's submission to its iteration.", _WAIT_BUCKETS
        )
        self._prefill_seconds = self._histogram(
            "prefill_seconds", "Time of the iteration that ran a prefill.", _WAIT_BUCKETS
        )
        self._block_outcomes = self._counter(
            "block_outcomes", "Blocks that left this worker.", "outcome"
        )
        self._refusals = self._counter("refusals", "Blocks that were not taken.", "code")
        self._abandoned = self._counter(
            "abandoned_streams", "Blocks whose reader went away before they ended."
        )
        self._transfers = self._counter("transfers", "KV transfers that ended.", "direction")
        self._transfer_failures = self._counter(
            "transfer_failures", "KV transfers that failed.", "direction", "reason"
        )
        self._transfer_bytes = self._counter("transfer_bytes", "KV moved.", "direction")
        self._transfer_seconds = self._histogram(
            "transfer_seconds", "Time of a KV transfer.", _WAIT_BUCKETS, "direction"
        )
        self._pairs = self._gauge("kv_pairs", "Open pairs with other workers, both directions.")
        self._staging_bytes = self._gauge(
            "kv_staging_bytes", "Device memory that transfers hold beside the pool."
        )
        self._role = self._gauge("role", "1 for the role in force.", "role")
        self._is_draining = self._gauge("is_draining", "1 while no new block is taken.")
        self._role_switches = self._counter("role_switches", "Role switches that ended.")
        self._unknown_roles = self._counter(
            "unknown_desired_roles", "Desired roles that were refused for being unknown."
        )
        self._is_lease_held = self._gauge("is_lease_held", "1 while the lease is in Redis.")
        self._heartbeats = self._counter("heartbeats", "Renewals of the lease.", "outcome")

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def pool_is(self, total_pages: int, tau_tokens: int) -> None:
        """Pool and budget as they are now."""
        self._total_pages.set(total_pages)
        self._tau_tokens.set(tau_tokens)

    def queues_are(self, status: LoopStatus) -> None:
        """The scheduler's state between two iterations."""
        self._waiting.set(status.num_waiting)
        self._running.set(status.num_running)
        self._blocks_here.set(status.num_blocks)
        self._free_pages.set(status.free_pages)
        self._carried_tokens.set(status.carried_tokens)

    def iteration_ran(
        self, plan: Plan, seconds: float, committed_tokens: int, gap_seconds: float | None
    ) -> None:
        """An iteration ended well. ``gap_seconds``: how long the device stood still for it,
        ``None`` where it had had nothing to do before."""
        self._iterations.inc()
        self._iteration_seconds.observe(seconds)
        if gap_seconds is not None:
            self._gap_seconds.observe(gap_seconds)
        self._prefill_tokens.inc(plan.num_prefill_tokens)
        self._decode_tokens.inc(plan.num_decode_tokens)
        self._committed_tokens.inc(committed_tokens)

    def iteration_failed(self) -> None:
        """The engine raised."""
        self._iteration_failures.inc()

    def prefilled(self, queue_seconds: float, prefill_seconds: float) -> None:
        """A prefill's iteration has run."""
        self._queue_seconds.observe(queue_seconds)
        self._prefill_seconds.observe(prefill_seconds)

    def block_left(self, outcome: str) -> None:
        """A block is gone: ``completed``, ``kv_sent`` or a loss's code."""
        self._block_outcomes.labels(outcome).inc()

    def refused(self, code: str) -> None:
        """A block was not taken."""
        self._refusals.labels(code).inc()

    def stream_abandoned(self) -> None:
        """A block's reader went away."""
        self._abandoned.inc()

    def transfer_ended(self, direction: str, seconds: float, num_bytes: int) -> None:
        """KV has moved (``direction``: ``sent`` or ``received``)."""
        self._transfers.labels(direction).inc()
        self._transfer_seconds.labels(direction).observe(seconds)
        self._transfer_bytes.labels(direction).inc(num_bytes)

    def transfer_failed(self, direction: str, reason: str) -> None:
        """A transfer failed or was refused."""
        self._transfer_failures.labels(direction, reason).inc()

    def transfers_hold(self, pairs: Callable[[], int], staging_bytes: Callable[[], int]) -> None:
        """What to ask, whenever metrics are read, for what open pairs hold."""
        self._pairs.set_function(pairs)
        self._staging_bytes.set_function(staging_bytes)

    def standing_is(self, role: Role, *, is_draining: bool) -> None:
        """Role and admission as they are now."""
        for each in Role:
            self._role.labels(each.value).set(each is role)
        self._is_draining.set(is_draining)

    def role_switched(self) -> None:
        """A role switch has ended."""
        self._role_switches.inc()

    def unknown_role_desired(self) -> None:
        """The ledger asks for a role that does not exist."""
        self._unknown_roles.inc()

    def heartbeat(self, *, is_held: bool) -> None:
        """A renewal of the lease went through, or not."""
        self._heartbeats.labels("renewed" if is_held else "failed").inc()

    def lease_is(self, *, is_held: bool) -> None:
        """Whether the lease is in Redis, as far as this worker knows."""
        self._is_lease_held.set(is_held)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=self.registry)
