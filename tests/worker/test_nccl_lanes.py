"""What NCCL transfers stage in and move on, and how many of them there may be at once."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.worker.harness import Client, a_client, a_decode, a_sequence, a_start, a_worker
from tests.worker.nccl_fake import FakeNccl, FakeNetwork
from tests.worker.nccl_rig import PAGE_BYTES, NcclRig, until
from tests.worker.side_streams_fake import FakeStreams
from tests.worker.transport_checks import a_pool, failed, move

from sangam_core.errors import TransferError
from sangam_core.placement import Role
from sangam_core.wire import PassRan
from sangam_worker.process import Worker
from sangam_worker.transfer.lanes import Lane, Lanes
from sangam_worker.transfer.layer_rows import LayerRows
from sangam_worker.transfer.memory import (
    COMMUNICATOR_BYTES,
    SLOT_BYTES,
    TRANSFERS_EACH_WAY,
    provided_bytes,
)
from sangam_worker.transfer.nccl import NcclTransport
from sangam_worker.transfer.protocol import Side


class TestLanes(NcclRig):
    def test_pairs_that_move_nothing_hold_no_lane(self) -> None:
        here, there = self.transports()
        pairs = [self.pair(here, there, str(number)) for number in range(3)]
        assert here.staging_bytes == there.staging_bytes == 0
        assert not any(device.made for device in self.devices_made)
        for channel in (channel for pair in pairs for channel in pair):
            channel.abort()
        assert here.staging_bytes == there.staging_bytes == 0

    def test_forty_pairs_that_move_one_after_another_use_one_lane(self) -> None:
        here, there = self.transports()
        for number in range(40):
            move(*self.pair(here, there, str(number)), range(30), range(30))
            assert here.staging_bytes == there.staging_bytes == self.lane_bytes
        assert [len(device.made) for device in self.devices_made] == [2, 2]
        here.close()
        assert (here.staging_bytes, there.staging_bytes) == (0, self.lane_bytes)

    def test_a_lane_that_the_device_has_not_let_go_of_is_lent_to_nobody(self) -> None:
        here, there = self.transports()
        here.warm_up()
        hung, others = (self.pair(here, there, name) for name in ("hung", "others"))
        copies = self.devices_made[0].made[0]
        copies.gate.clear()
        with ThreadPoolExecutor(2) as executor:
            end = executor.submit(hung[0].send, (0, 1), 0.1)
            other_end = executor.submit(hung[1].receive, (0, 1), 0.1)
            assert failed(other_end)
            move(*others, range(20), range(20))
            assert len(self.devices_made[0].made) == 4
            assert here.staging_bytes == 2 * self.lane_bytes
            assert not end.done()
            copies.gate.set()
            assert failed(end)
        move(*others, range(20), range(20))
        assert here.staging_bytes == 2 * self.lane_bytes

    def test_a_transfer_that_failed_gives_its_lane_back_once_the_device_has_let_go(self) -> None:
        here, there = self.transports(transfers_each_way=1)
        for number in range(3):
            sender, receiver = self.pair(here, there, str(number))
            with pytest.raises(TransferError):
                sender.send((0,), 0.1)
            receiver.abort()
        move(*self.pair(here, there, "last"), (0,), (0,))
        assert [len(device.made) for device in self.devices_made] == [2, 2]

    def test_a_lane_of_a_device_that_failed_is_never_lent_again(self) -> None:
        here, there = self.transports(transfers_each_way=1)
        here.warm_up()
        (sender, receiver), (other, _) = (self.pair(here, there, name) for name in ("1", "2"))
        self.devices_made[0].made[0].failure = RuntimeError("an illegal memory access")
        with pytest.raises(RuntimeError):
            sender.send((0,), 5.0)
        receiver.abort()
        with pytest.raises(TransferError, match="1 transfers are under way"):
            other.send((0,), 0.2)
        here.close()
        assert here.staging_bytes == self.lane_bytes

    def test_a_transfer_beyond_the_bound_waits_for_a_lane_until_its_deadline(self) -> None:
        here, there = self.transports(transfers_each_way=1)
        first, second, third = (self.pair(here, there, name) for name in ("1", "2", "3"))
        with ThreadPoolExecutor(2) as executor:
            under_way = executor.submit(first[0].send, (0, 1), 20.0)
            assert until(lambda: here.staging_bytes == self.lane_bytes)
            waiting = executor.submit(second[0].send, (2,), 20.0)
            began = time.monotonic()
            with pytest.raises(TransferError, match=r"1 transfers.*this worker as their sender"):
                third[0].send((3,), 0.2)
            assert 0.1 < time.monotonic() - began < 5
            assert not waiting.done()
            assert first[1].receive((0, 1), 10.0) == under_way.result(10)
            assert second[1].receive((2,), 10.0) == waiting.result(10)
        assert [len(device.made) for device in self.devices_made] == [2, 2]

    def test_a_transfer_that_waits_for_a_lane_is_woken_by_an_abort(self) -> None:
        here, there = self.transports(transfers_each_way=1)
        first, second = (self.pair(here, there, name) for name in ("1", "2"))
        with ThreadPoolExecutor(2) as executor:
            under_way = executor.submit(first[0].send, (0, 1), 20.0)
            assert until(lambda: here.staging_bytes == self.lane_bytes)
            waiting = executor.submit(second[0].send, (2,), 60.0)
            second[0].abort()
            with pytest.raises(TransferError, match="aborted"):
                waiting.result(10)
            assert first[1].receive((0, 1), 10.0) == under_way.result(10)

    def test_sends_leave_the_lanes_of_receives_alone(self) -> None:
        here, there = self.transports(transfers_each_way=1)
        out, back = self.pair(here, there, "out"), self.pair(there, here, "back")
        with ThreadPoolExecutor(1) as executor:
            under_way = executor.submit(out[0].send, (0, 1), 20.0)
            assert until(lambda: here.staging_bytes == self.lane_bytes)
            move(*back, (5,), (5,))
            assert out[1].receive((0, 1), 10.0) == under_way.result(10)

    def test_a_small_pool_stages_no_more_than_itself(self) -> None:
        pool = a_pool()
        here = self.a_transport(pool, slot_bytes=2**30)
        there = self.a_transport(a_pool(), slot_bytes=2**30)
        move(*self.pair(here, there), (0,), (0,))
        assert here.staging_bytes == 2 * pool.layers.nbytes + 8 * 64

    def test_memory_that_is_short_is_an_error_of_the_transfer(self) -> None:
        here, there = self.transports(transfers_each_way=1)
        self.devices_made[0].is_out_of_memory = True
        sender, receiver = self.pair(here, there)
        with pytest.raises(TransferError, match="no memory to stage KV in"):
            sender.send((0,), 5.0)
        with pytest.raises(TransferError):
            receiver.receive((0,), 0.5)
        self.devices_made[0].is_out_of_memory = False
        move(*self.pair(here, there, "again"), (0,), (0,))


class Fleet:
    """Colocated workers on one network, each with a device of its own."""

    def __init__(self, **options: int) -> None:
        self.network = FakeNetwork()
        self.devices: list[FakeStreams] = []
        self.libraries: list[FakeNccl] = []
        self._options = {"max_ctas": 4, "slot_bytes": 1000, "pairs_each_way": 8, **options}

    def make_transport(self, pool: Any) -> NcclTransport:
        self.devices.append(FakeStreams(jitter_seconds=0.005))
        self.libraries.append(self.network.library())
        return NcclTransport(pool, self.libraries[-1], self.devices[-1], **self._options)

    @asynccontextmanager
    async def workers(self, number: int) -> AsyncIterator[tuple[Client, list[Worker]]]:
        async with AsyncExitStack() as running:
            client = await running.enter_async_context(a_client())
            settings = {"role": Role.COLOCATED, "make_transport": self.make_transport}
            yield (
                client,
                [
                    await running.enter_async_context(a_worker(worker_id=f"w{n}", **settings))
                    for n in range(number)
                ],
            )
        for device in self.devices:
            device.close()
        assert self.network.misuses == []


async def all_fetch_from_all_others(client: Client, workers: list[Worker], turn: int) -> None:
    """A block each way between every two workers, at the same time."""
    ids = a_sequence()
    routes = [(a, b) for a in workers for b in workers if a is not b]
    firsts = []
    for n, (sender, _) in enumerate(routes):
        start = a_start(sender, f"r{turn}-{n}", ids=ids, hands_over=True)
        firsts.append(await client.start(sender, start))
        await firsts[-1].until(PassRan)
    seconds = await asyncio.gather(
        *(
            client.start(b, a_decode(b, a, first.overlay(ids), f"r{turn}-{n}"))
            for n, ((a, b), first) in enumerate(zip(routes, firsts, strict=True))
        )
    )
    ends = await asyncio.gather(*(run.rest() for run in seconds))
    assert {end[-1] for end in ends} == {"completed"}
    assert {(await run.rest())[-1] for run in firsts} == {"kv_sent"}


async def test_workers_that_all_fetch_from_all_others_never_wait_for_each_other_in_a_circle() -> (
    None
):
    """Each has one lane to send on and one to receive on."""
    fleet = Fleet(transfers_each_way=1)
    async with fleet.workers(4) as (client, workers):
        for turn in range(3):
            await all_fetch_from_all_others(client, workers, turn)
        assert [library.num_open for library in fleet.libraries] == [6] * 4
    assert all(len(device.made) <= 4 for device in fleet.devices)


async def test_communicators_stay_within_what_memory_is_provided_for() -> None:
    """Each worker has two peers more than pairs, each way."""
    fleet = Fleet(transfers_each_way=1, pairs_each_way=1)
    async with fleet.workers(4) as (client, workers):
        for turn in range(2):
            await all_fetch_from_all_others(client, workers, turn)
            for worker, library in zip(workers, fleet.libraries, strict=True):
                assert worker.exchange.num_pairs <= 2
                assert until(lambda library=library: library.num_open <= 2)  # type: ignore[misc]
        assert max(len(library.made) for library in fleet.libraries) > 2


async def test_a_receiver_learns_of_its_sender_s_failure_where_nccl_does_not_tell() -> None:
    fleet = Fleet()
    fleet.network.tells_of_ends = False
    async with fleet.workers(2) as (client, (sender, receiver)):
        fleet.devices[0].is_out_of_memory = True
        ids = a_sequence()
        first = await client.start(sender, a_start(sender, ids=ids, hands_over=True))
        await first.until(PassRan)
        began = time.monotonic()
        second = await client.start(receiver, a_decode(receiver, sender, first.overlay(ids)))
        assert (await second.rest())[-1] == (await first.rest())[-1] == "lost"
        assert time.monotonic() - began < 5  # of a deadline of 10
        fleet.devices[0].is_out_of_memory = False


def some_lanes(each_way: int = TRANSFERS_EACH_WAY) -> Lanes:
    return Lanes(FakeStreams(), LayerRows(a_pool()), 2 * PAGE_BYTES, each_way)


def take(lanes: Lanes, side: Side, seconds: float = 0.05) -> Lane:
    return lanes.take(side, time.monotonic() + seconds, lambda: None)


def test_no_two_lanes_share_one_of_torch_s_32_streams() -> None:
    lanes = some_lanes()
    lent = [take(lanes, side) for side in Side for _ in range(TRANSFERS_EACH_WAY)]
    assert len({stream.handle for lane in lent for stream in (lane.copies, lane.wire)}) == 32
    for side in Side:
        with pytest.raises(TransferError, match=f"8 transfers .* as their {side}"):
            take(lanes, side)


def test_lanes_are_lent_in_the_order_in_which_they_were_asked_for() -> None:
    lanes, order = some_lanes(each_way=1), []
    lane = take(lanes, Side.SENDER)

    def take_a_turn(number: int, is_waiting: threading.Event) -> None:
        mine = lanes.take(Side.SENDER, time.monotonic() + 20, is_waiting.set)
        order.append(number)
        lanes.give_back(mine, Side.SENDER)

    with ThreadPoolExecutor(5) as executor:
        asked = []
        for number in range(5):
            is_waiting = threading.Event()
            asked.append(executor.submit(take_a_turn, number, is_waiting))
            assert is_waiting.wait(10)
        lanes.give_back(lane, Side.SENDER)
        for each in asked:
            each.result(10)
    assert order == [0, 1, 2, 3, 4]


def test_memory_is_left_for_as_many_transfers_and_pairs_as_may_go_one_way() -> None:
    assert provided_bytes(10) == 8 * 2 * SLOT_BYTES + 10 * COMMUNICATOR_BYTES
