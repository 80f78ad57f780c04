"""The fleet view: readiness, limits, and who was lost, from snapshots made by hand."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.router.ledger.world import lease, until

from sangam_core.errors import Unavailable
from sangam_core.lease import WorkerLease
from sangam_core.placement import Demand, FleetLoad, PlacementPolicy, Role, WorkerLoad
from sangam_core.wire import PROTOCOL_VERSION
from sangam_router.fleet import FleetLimits, FleetView
from sangam_router.ledger import FleetSnapshot
from sangam_router.ledger.compatibility import Misfit, Service

LEASE_SECONDS = 5.0


class Source:
    """Snapshots of the leases that a test has put in, at a time that it sets."""

    def __init__(self) -> None:
        self.now_seconds = 1000.0
        self.answering_since_seconds: float | None = 0.0
        self.leases: list[WorkerLease] = []
        self.incompatible: tuple[Misfit, ...] = ()
        self.num_snapshots = 0
        self._observers: list[Callable[[FleetSnapshot], None]] = []

    def observe(self, observer: Callable[[FleetSnapshot], None]) -> None:
        self._observers.append(observer)

    async def snapshot(self) -> FleetSnapshot:
        self.num_snapshots += 1
        if self.answering_since_seconds is None:
            raise Unavailable("Redis is away")
        taken = self.take()
        for observer in self._observers:
            observer(taken)
        return taken

    def take(self) -> FleetSnapshot:
        workers = tuple(
            WorkerLoad(
                each.worker_id,
                each.epoch,
                each.role,
                0,
                0,
                each.total_pages,
                each.is_draining,
                max_sequence_tokens=each.max_sequence_tokens,
                kv_format=each.kv_format,
            )
            for each in self.leases
        )
        by_id = {each.worker_id: each for each in self.leases}
        return FleetSnapshot(FleetLoad(workers), by_id, self.incompatible, 0, 0, self.now_seconds)


async def seen(*leases: WorkerLease, **policy: Any) -> tuple[Source, FleetView]:
    """A view that has seen these workers."""
    source = Source()
    view = FleetView(
        source,
        policy=PlacementPolicy(**policy),
        worker_lease_seconds=LEASE_SECONDS,
        clock=lambda: source.now_seconds,
    )
    source.leases = list(leases)
    await source.snapshot()
    return source, view


def misfit(unusable: WorkerLease) -> Misfit:
    service = Service("small", PROTOCOL_VERSION, 32)
    found = service.misfit(unusable.worker_id, unusable.fields())
    assert found is not None
    return found


def prefill(worker_id: str = "p", **changes: Any) -> WorkerLease:
    return lease(worker_id, role=Role.PREFILL, **changes)


def decode(worker_id: str = "d", **changes: Any) -> WorkerLease:
    return lease(worker_id, role=Role.DECODE, **changes)


# -- readiness ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leases", "problem"),
    [
        ([], "no worker is ready"),
        ([prefill()], "no decode-capable worker is ready"),
        ([decode()], "no worker that takes prefills is ready"),
        ([lease(is_draining=True)], "no worker is ready"),
        ([prefill(), decode(is_draining=True)], "no decode-capable worker is ready"),
        ([prefill(), decode()], None),
        ([prefill(), lease("c")], None),
        ([lease("c")], None),
        ([lease("c"), decode()], None),
    ],
)
async def test_ready_means_that_a_block_can_be_prefilled_and_decoded(
    leases: list[WorkerLease], problem: str | None
) -> None:
    _, view = await seen(*leases)
    assert view.problem() == problem
    assert view.is_ready == (problem is None)
    assert (view.limits() is None) == (problem is not None)


def test_before_the_first_snapshot_nothing_is_ready() -> None:
    view = FleetView(Source(), policy=PlacementPolicy(), worker_lease_seconds=LEASE_SECONDS)
    assert not view.is_ready
    assert view.limits() is None
    assert "has not been seen" in (view.problem() or "")


async def test_workers_of_another_model_are_named_when_there_are_no_others() -> None:
    source, view = await seen()
    source.incompatible = (
        misfit(lease("x", model="big")),
        misfit(lease("y", protocol=9, block_length=16)),
    )
    await source.snapshot()
    assert view.problem() == (
        "no worker is ready (2 cannot be used: model big, here small (SANGAM_MODEL); "
        f"protocol 9, here {PROTOCOL_VERSION} (another version), "
        "block_length 16, here 32 (SANGAM_BLOCK_LENGTH))"
    )
    source.leases = [prefill()]
    await source.snapshot()
    assert "no decode-capable worker is ready (2 cannot be used" in (view.problem() or "")


async def test_a_fleet_that_mixes_quantizations_serves_and_says_so() -> None:
    alike = [prefill(quantization="fp8"), decode(quantization="fp8")]
    assert (await seen(*alike))[1].remark() is None
    assert (await seen(prefill(), decode()))[1].remark() is None
    _, view = await seen(*alike, lease("c"))
    assert view.is_ready
    assert view.remark() == (
        "workers differ in SANGAM_QUANTIZATION (2 with 'fp8', 1 with 'none'): "
        "an answer may depend on where its blocks run"
    )


async def test_a_fleet_whose_kv_differs_says_so() -> None:
    one, other = {"kv_format": "float32 by gloo"}, {"kv_format": "bfloat16 by gloo"}
    assert (await seen(prefill(**one), decode(**one), lease("older")))[1].remark() is None
    source, view = await seen(prefill(**one), decode(**other))
    formats = (
        "SANGAM_DTYPE, SANGAM_KV_TRANSPORT: 1 with 'bfloat16 by gloo', 1 with 'float32 by gloo'"
    )
    assert view.remark() == f"blocks are handed over only between workers of the same KV: {formats}"
    assert view.problem() == (
        f"no worker that decodes the prefill workers' KV ({formats}) is ready"
    )
    source.leases = [*source.leases, lease("c", **other)]
    await source.snapshot()
    assert view.is_ready


async def test_a_cache_none_request_needs_a_colocated_worker() -> None:
    assert not (await seen(prefill(), decode()))[1].has_colocated
    assert not (await seen(lease("c", is_draining=True)))[1].has_colocated
    assert (await seen(prefill(), lease("c")))[1].has_colocated


# -- limits -------------------------------------------------------------------------------


def demand_of(total_tokens: int) -> Demand:
    return Demand("r", total_tokens, -(-total_tokens // 16))


async def test_limits_are_what_some_pair_of_workers_can_take() -> None:
    _, view = await seen(
        prefill("p1", total_pages=50, max_sequence_tokens=4096),
        prefill("p2", total_pages=80, max_sequence_tokens=928),
        decode("d1", total_pages=60, max_sequence_tokens=8192),
    )
    assert view.limits() == FleetLimits(928, 0)
    assert view.can_ever_hold(demand_of(928))
    assert not view.can_ever_hold(demand_of(929))


async def test_one_worker_that_takes_long_sequences_is_enough() -> None:
    _, view = await seen(
        lease("short", max_sequence_tokens=1024),
        lease("long", max_sequence_tokens=4096, total_pages=200),
    )
    assert view.limits() == FleetLimits(3200, 4096)


async def test_a_worker_that_drains_still_counts_for_what_can_ever_fit() -> None:
    _, view = await seen(
        lease("short", max_sequence_tokens=512),
        lease("long", max_sequence_tokens=1024, is_draining=True),
    )
    limits = view.limits()
    assert limits is not None
    assert (limits.max_sequence_tokens, limits.max_tokens_without_kv) == (1024, 1024)


async def test_static_disaggregation_counts_the_prefill_workers_pools_only() -> None:
    leases = (prefill(total_pages=10), lease("c", total_pages=100))
    _, hybrid = await seen(*leases)
    _, static = await seen(*leases, is_overflow_allowed=False)
    hybrid_limits, static_limits = hybrid.limits(), static.limits()
    assert hybrid_limits is not None
    assert static_limits is not None
    assert (hybrid_limits.max_sequence_tokens, static_limits.max_sequence_tokens) == (1600, 160)


async def test_what_can_ever_fit_stays_while_leases_come_back_to_an_emptied_redis() -> None:
    source, view = await seen(
        lease("long", max_sequence_tokens=1600), lease("short", role=Role.DECODE, total_pages=10)
    )
    before = view.limits()
    source.answering_since_seconds = source.now_seconds
    for back in ([], [lease("q", role=Role.PREFILL, total_pages=10), source.leases[1]]):
        source.leases = back
        await source.snapshot()
        assert view.limits() == before
        assert view.can_ever_hold(demand_of(1600))
        assert view.has_colocated
    source.now_seconds += LEASE_SECONDS + 0.1
    await source.snapshot()
    assert view.limits() == FleetLimits(160, 0)
    assert not view.can_ever_hold(demand_of(161))
    assert not view.has_colocated


async def test_what_can_ever_fit_shrinks_at_once_with_a_worker_that_is_lost() -> None:
    source, view = await seen(lease("long"), lease("short", max_sequence_tokens=512))
    source.leases = source.leases[1:]
    await source.snapshot()
    assert view.limits() == FleetLimits(512, 512)


# -- losses -------------------------------------------------------------------------------


async def test_a_lease_that_is_gone_loses_the_worker() -> None:
    source, view = await seen(lease("w"), lease("v"))
    lost, kept = view.lost("w", "w-1"), view.lost("v", "v-1")
    source.leases = [lease("v")]
    await source.snapshot()
    assert lost.is_set()
    assert not kept.is_set()


async def test_another_epoch_loses_the_worker_at_once() -> None:
    source, view = await seen(lease("w"))
    source.answering_since_seconds = source.now_seconds
    lost = view.lost("w", "w-1")
    source.leases = [lease("w", epoch="w-2")]
    await source.snapshot()
    assert lost.is_set()
    assert not view.lost("w", "w-2").is_set()


async def test_a_worker_lost_before_anyone_asked_is_lost_with_the_next_snapshot() -> None:
    source, view = await seen(lease("w", epoch="w-2"))
    lost = view.lost("w", "w-1")
    await source.snapshot()
    assert lost.is_set()


async def test_everyone_who_follows_a_worker_is_told() -> None:
    source, view = await seen(lease("w"))
    first, second = view.lost("w", "w-1"), view.lost("w", "w-1")
    source.leases = []
    await source.snapshot()
    assert first.is_set()
    assert second.is_set()


async def test_after_redis_was_emptied_a_missing_lease_is_no_loss_for_one_lease() -> None:
    source, view = await seen(lease("w"))
    lost = view.lost("w", "w-1")
    source.leases = []
    source.answering_since_seconds = source.now_seconds
    await source.snapshot()
    source.now_seconds += LEASE_SECONDS
    await source.snapshot()
    assert not lost.is_set()
    source.now_seconds += 0.1
    await source.snapshot()
    assert lost.is_set()


async def test_a_worker_that_comes_back_within_the_grace_was_never_lost() -> None:
    source, view = await seen(lease("w"))
    lost = view.lost("w", "w-1")
    source.leases = []
    source.answering_since_seconds = source.now_seconds
    await source.snapshot()
    source.leases = [lease("w")]
    source.now_seconds += 2 * LEASE_SECONDS
    await source.snapshot()
    assert not lost.is_set()


async def test_draining_is_no_loss() -> None:
    source, view = await seen(lease("w"))
    lost = view.lost("w", "w-1")
    source.leases = [lease("w", is_draining=True)]
    await source.snapshot()
    assert not lost.is_set()


async def test_a_snapshot_that_was_overtaken_is_dropped() -> None:
    source, view = await seen(lease("w"))
    late = source.take()
    source.now_seconds += 1.0
    source.leases = [lease("w", epoch="w-2")]
    await source.snapshot()
    view.see(late)
    assert view.leases["w"].epoch == "w-2"


async def test_a_change_of_the_members_is_told_and_a_change_of_loads_is_not() -> None:
    source, view = await seen(lease("w"))
    waiting = asyncio.create_task(view.wait_for_change(10.0))
    await asyncio.sleep(0)
    await source.snapshot()
    await asyncio.sleep(0)
    assert not waiting.done()
    source.leases = [lease("w", is_draining=True)]
    await source.snapshot()
    await asyncio.wait_for(waiting, 1.0)
    await view.wait_for_change(0.01)


async def test_it_looks_by_itself_and_bears_redis_being_away() -> None:
    source, view = await seen()
    looking = asyncio.create_task(view.run(0.001))
    source.answering_since_seconds = None
    before = source.num_snapshots

    async def has_tried_again() -> bool:
        return source.num_snapshots >= before + 2

    await until(has_tried_again, "a second look")
    source.answering_since_seconds = 0.0
    source.leases = [lease("w")]

    async def is_ready() -> bool:
        return view.is_ready

    await until(is_ready, "the worker is seen")
    looking.cancel()
    await asyncio.wait([looking])
