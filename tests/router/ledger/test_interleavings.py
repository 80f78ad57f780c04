"""Any interleaving of routers, workers, crashes and data losses against a model of the ledger.

The model is what the routers hold and who waits. Two things must be true after every step: each
counter is the sum of its records, and (while no data was lost) nobody overtook an older waiter nor
got pages that others hold. Once everyone has had a heartbeat, Redis holds exactly the model.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.router.ledger.world import World, block, demand, lease, ticket

from sangam_core.placement import Role, WorkerLoad
from sangam_router.ledger import Ledger, Line, Refused, Reservation
from sangam_router.ledger.audit import Audit
from sangam_router.ledger.connect import connect
from sangam_router.local.redis_server import RedisServer

pytestmark = pytest.mark.integration

T = TypeVar("T")
ROUTERS = st.sampled_from("ab")
WORKERS = st.sampled_from(["w1", "w2"])
REQUESTS = st.integers(1, 8)
"""Requests by number; the number is the arrival as well. Odd ones are router a's, even ones b's."""
LINES = st.sampled_from(Line)
ROLES = st.sampled_from([Role.COLOCATED, Role.COLOCATED, Role.PREFILL, Role.DECODE])


class LedgerMachine(RuleBasedStateMachine):
    """Two routers, two workers, eight requests. Router a counts blocks; b, like one of an older
    version, does not."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.do(self._start())
        self.leases: dict[str, Any] = {}
        self.held: list[tuple[Ledger, Reservation, set[str]]] = []
        self.waiting: dict[tuple[Line, int], Ledger] = {}
        self.num_epochs = 0
        self.is_settled = True
        for name in ("w1", "w2"):
            self.change_worker(name, Role.COLOCATED, 12)

    async def _start(self) -> None:
        self.redis = connect(self.server.url, timeout_seconds=2.0)
        self.world = World(self.redis, "machine")
        await self.world.empty()
        self.routers = {name: self._new_router(name) for name in "ab"}

    def _new_router(self, name: str) -> Ledger:
        return self.world.router(name, counts_blocks=name == "a")

    def do(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return self.runner.run(run())

    # -- workers --------------------------------------------------------------------------

    @rule(name=WORKERS, role=ROLES, pages=st.integers(4, 16))
    def change_worker(self, name: str, role: Role, pages: int) -> None:
        self.num_epochs += 1
        self.leases[name] = lease(name, epoch=f"e{self.num_epochs}", role=role, total_pages=pages)
        self.do(self.world.publish(self.leases[name]))

    @rule(name=WORKERS)
    def lose_worker(self, name: str) -> None:
        self.leases.pop(name, None)
        self.do(self.world.lose(name))

    @rule(name=WORKERS, is_draining=st.booleans())
    def drain_worker(self, name: str, is_draining: bool) -> None:
        if name in self.leases:
            self.leases[name] = self.leases[name].model_copy(update={"is_draining": is_draining})
            self.do(self.world.publish(self.leases[name]))

    # -- requests -------------------------------------------------------------------------

    @rule(line=LINES, number=REQUESTS, pages=st.just(0) | st.integers(1, 6))
    def reserve(self, line: Line, number: int, pages: int) -> None:
        """Without pages: a block that keeps no KV, which is never moved."""
        pages = max(pages, int(line is Line.DECODE))
        ledger = self._router_of(number)
        if (line, number) in self.waiting:
            pages = 2  # as it said when it joined
        snapshot = self.do(ledger.snapshot())
        for worker in snapshot.fleet.workers:
            got = self.do(self._reserve(ledger, line, number, pages, worker))
            if isinstance(got, Reservation):
                self._check_order(line, number)
                self._check_pages(worker, pages)
                kinds = {"pages", "blocks"} | ({"load"} if line is Line.PREFILL else set())
                self.held.append((ledger, got, kinds))
                self.waiting.pop((line, number), None)
                return
            assert isinstance(got, Refused)

    @rule(line=LINES, numbers=st.lists(REQUESTS, min_size=3, max_size=6), pages=st.integers(1, 5))
    def reserve_several(self, line: Line, numbers: list[int], pages: int) -> None:
        for number in numbers:
            self.reserve(line, number, pages)

    def _router_of(self, number: int) -> Ledger:
        return self.routers["ba"[number % 2]]

    def _reserve(
        self, ledger: Ledger, line: Line, number: int, pages: int, worker: WorkerLoad
    ) -> Awaitable[Reservation | Refused]:
        name = f"r{number}"
        what = (
            ticket(name, float(number)),
            block(name),
            demand(name, pages, cost_tokens=50),
            worker,
        )
        if line is Line.PREFILL:
            return ledger.reserve_prefill(*what)
        return ledger.reserve_decode(*what)

    def _check_order(self, line: Line, number: int) -> None:
        older = [n for where, n in self.waiting if where is line and n < number]
        assert not older or not self.is_settled, f"{number} overtook {older}"

    def _check_pages(self, worker: WorkerLoad, pages: int) -> None:
        held = sum(
            got.num_pages
            for _, got, kinds in self.held
            if "pages" in kinds and (got.worker_id, got.epoch) == (worker.worker_id, worker.epoch)
        )
        assert held + pages <= worker.total_pages or not self.is_settled

    @precondition(lambda self: self.held)
    @rule(data=st.data(), kind=st.sampled_from(["load", "all"]))
    def release(self, data: st.DataObject, kind: str) -> None:
        ledger, got, kinds = data.draw(st.sampled_from(self.held))
        call = {
            "load": ledger.release_load,
            "all": ledger.release,
        }[kind]
        self.do(call(got))
        kinds -= {
            "load": {"load"},
            "all": {"load", "pages", "blocks"},
        }[kind]

    @rule(line=LINES, number=REQUESTS)
    def join(self, line: Line, number: int) -> None:
        ledger = self._router_of(number)
        who = ticket(f"r{number}", float(number))
        if line is Line.PREFILL:
            self.do(ledger.join_line(who))
        else:
            self.do(ledger.join_decode_line(who, num_pages=2))
        self.waiting[line, number] = ledger

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        line, number = data.draw(st.sampled_from(sorted(self.waiting)))
        ledger = self.waiting.pop((line, number))
        self.do(ledger.leave_line(ticket(f"r{number}", float(number)), line))

    # -- disasters ------------------------------------------------------------------------

    @rule(router=ROUTERS)
    def kill_router(self, router: str) -> None:
        dead = self.routers[router]
        self.do(self.world.expire(dead))
        self.routers[router] = self._new_router(router)
        self.held = [entry for entry in self.held if entry[0] is not dead]
        self.waiting = {key: who for key, who in self.waiting.items() if who is not dead}

    @rule(router=ROUTERS)
    def pause_router_until_its_lease_is_gone(self, router: str) -> None:
        self.do(self.world.expire(self.routers[router]))
        self.is_settled = False

    @rule()
    def empty_redis(self) -> None:
        self.do(self.world.empty())
        self.do(self.world.publish(*self.leases.values()))
        self.is_settled = False

    @rule(router=ROUTERS)
    def heartbeat(self, router: str) -> None:
        self.do(self.routers[router].heartbeat())

    # -- what must be true ----------------------------------------------------------------

    @invariant()
    def counters_are_the_sums_of_the_records(self) -> None:
        found = self.do(self._audit())
        assert not found.differences

    async def _audit(self) -> Audit:
        return await self.routers["a"].audit()

    @rule()
    def everyone_has_had_a_heartbeat(self) -> None:
        self.do(self.world.publish(*self.leases.values()))
        for _ in range(2):
            for ledger in self.routers.values():
                self.do(ledger.heartbeat())
        self.is_settled = True
        found = self.do(self._audit())
        epochs = {(name, each.epoch) for name, each in self.leases.items()}
        counting = self.routers["a"].owner
        assert sorted(
            (record.owner, record.kind, record.block_key, record.amount) for record in found.records
        ) == sorted(
            (ledger.owner, kind, str(got.key), amount)
            for ledger, got, kinds in self.held
            for kind, amount in (
                ("load", got.cost_tokens),
                ("pages", got.num_pages),
                ("blocks", int(ledger.owner == counting and got.num_pages > 0)),
            )
            if kind in kinds and amount and (got.worker_id, got.epoch) in epochs
        )
        assert sorted((e.line, e.request_id, e.owner) for e in found.entries) == sorted(
            (line, f"r{number}", ledger.owner) for (line, number), ledger in self.waiting.items()
        )

    def teardown(self) -> None:
        self.everyone_has_had_a_heartbeat()
        for name in self.routers:
            self.kill_router(name)
        self.do(self.routers["a"].heartbeat())
        assert self.do(self.world.is_empty())
        self.do(self._stop())
        self.runner.close()

    async def _stop(self) -> None:
        await self.world.aclose()
        await self.redis.aclose()


@pytest.mark.timeout(300)
def test_any_interleaving_keeps_the_ledger_true(redis_server: RedisServer) -> None:
    machine = type("Machine", (LedgerMachine,), {"server": redis_server})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None)
    )
