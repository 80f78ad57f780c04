"""KV over NCCL, on a fake of it whose calls are bound against the installed signatures."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import SecretStr
from tests.worker.fakes import NEVER, toy_answer
from tests.worker.harness import a_client, a_decode, a_sequence, a_start, a_worker
from tests.worker.nccl_fake import FakeCommunicator, FakeNccl, FakeNetwork
from tests.worker.nccl_installed import INSTALL, is_installed, signature
from tests.worker.nccl_rig import PAGE_BYTES, NcclRig, until
from tests.worker.side_streams_fake import FakeStreams
from tests.worker.transport_checks import TransportChecks, a_pool, failed, move

from benchmarks.gpu.nccl_loop import NcclLoop
from sangam_core.errors import ConfigurationError, TransferError
from sangam_core.placement import Role
from sangam_core.wire import PassRan
from sangam_worker.device import TorchBuild
from sangam_worker.kv_pool import KVPool
from sangam_worker.settings import WorkerSettings
from sangam_worker.transfer import nccl, nccl_channel
from sangam_worker.transfer.choice import open_transport, prepare_transport
from sangam_worker.transfer.chunks import Chunk, chunks_of, pages_in
from sangam_worker.transfer.layer_rows import LayerRows
from sangam_worker.transfer.memory import SLOT_BYTES
from sangam_worker.transfer.nccl import NcclTransport
from sangam_worker.transfer.nccl_library import load_nccl
from sangam_worker.transfer.protocol import Side


class Rig(NcclRig, TransportChecks):
    """What all transports must do, on slots of several sizes."""


class TestNcclOnASlowDevice(Rig):
    """One page a message, and nothing done when a call returns."""

    jitter_seconds = 0.002
    slot_pages = 1


class TestNcclInWholeTransfers(Rig):
    """Everything in one message."""

    slot_pages = 1000


class TestNcclThatHearsNothingOfItsPeer(Rig):
    """As without a network card between: only the deadline tells."""

    @pytest.fixture(autouse=True)
    def _deaf(self, _network: None) -> None:
        self.network.tells_of_ends = False


class TestNccl(Rig):
    """Several messages a layer, or a layer or two a message; and what is peculiar to NCCL."""

    def test_slots_are_used_again_only_when_they_are_free(self) -> None:
        """The receiver's scatters lag far behind its receives."""
        source, target = self.pools()
        here, there = self.a_transport(source), self.a_transport(target)
        there.warm_up()
        sender, receiver = self.pair(here, there)
        copies, wire = self.devices_made[1].made
        copies.jitter_seconds = 0.02
        move(sender, receiver, range(20), range(12, 32))
        assert torch.equal(target.layers[:, 12:32], source.layers[:, :20])
        assert wire.failure is None

    def test_a_peer_s_end_is_told_at_once_where_nccl_knows(self) -> None:
        sender, receiver = self.a_pair()
        with ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(receiver.receive, (0,), 60.0)
            sender.abort()
            with pytest.raises(TransferError, match="remote process exited"):
                waiting.result(10)

    def test_an_abort_wakes_the_call_that_waits(self) -> None:
        sender, receiver = self.a_pair()
        with ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(receiver.receive, (0,), 60.0)
            receiver.abort()
            with pytest.raises(TransferError, match="aborted"):
                waiting.result(10)
        sender.abort()

    def test_ends_that_disagree_on_the_pages_fail_at_the_deadline(self) -> None:
        sender, receiver = self.a_pair()
        with ThreadPoolExecutor(1) as executor:
            sent = executor.submit(sender.send, (1, 2, 3), 0.5)
            with pytest.raises(TransferError):
                receiver.receive((1, 2), 0.5)
            assert failed(sent)

    def test_pages_that_are_not_in_the_pool_never_reach_the_device(self) -> None:
        sender, receiver = self.a_pair()
        for pages in ((64,), (-1,), ()):
            with pytest.raises(ValueError, match="of a pool of 64"):
                sender.send(pages, 5.0)
            with pytest.raises(TransferError):
                receiver.receive((0,), 0.2)
            sender, receiver = self.a_pair()
        assert not any(stream.failure for device in self.devices_made for stream in device.made)

    @pytest.mark.parametrize("name", ["send", "recv"])
    def test_a_call_that_is_stuck_in_nccl_is_aborted_from_outside(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nccl_channel, "_STUCK_SECONDS", 0.1)
        sender, receiver = self.a_pair()
        self.network.stuck_in = {name}
        call = sender.send if name == "send" else receiver.receive
        with ThreadPoolExecutor(1) as executor:
            for_ever = executor.submit(call, (0,), 0.2)
            assert failed(for_ever)
        self.network.stuck_in = set()
        move(*self.a_pair(), (0,), (1,))

    def test_an_aborted_call_returns_only_when_the_device_has_let_go_of_the_pages(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nccl_channel, "_LET_GO_SECONDS", 0.05)
        here, there = self.transports()
        here.warm_up()
        sender, _ = self.pair(here, there)
        copies = self.devices_made[0].made[0]
        copies.gate.clear()
        with ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(sender.send, (0, 1), 0.1)
            assert until(lambda: here.ailment() is not None)
            assert "does not end" in str(here.ailment())
            assert not waiting.done()
            copies.gate.set()
            assert failed(waiting)
        assert here.ailment() is None

    def test_an_idle_end_that_does_not_come_to_an_end_is_told_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NCCL's abort waits for the device: a call in it says nothing by itself."""
        monkeypatch.setattr(nccl_channel, "_LET_GO_SECONDS", 0.05)
        here, there = self.transports()
        sender, receiver = self.pair(here, there)
        move(sender, receiver, (0,), (0,))
        held_up = threading.Event()
        monkeypatch.setattr(FakeCommunicator, "abort", lambda each: held_up.wait(20))
        sender.abort()
        assert until(lambda: here.ailment() is not None)
        held_up.set()
        assert until(lambda: here.ailment() is None)

    def test_a_device_that_fails_makes_the_worker_unready(self) -> None:
        here, there = self.transports()
        here.warm_up()
        sender, receiver = self.pair(here, there)
        self.devices_made[0].made[0].failure = RuntimeError("an illegal memory access")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            sender.send((0,), 5.0)
        assert "illegal memory access" in str(here.ailment())
        receiver.abort()

    @pytest.mark.parametrize("bug", [TypeError, AttributeError])
    @pytest.mark.parametrize("name", ["get_unique_id", "init", "send", "get_async_error"])
    def test_a_call_that_nccl_does_not_take_is_told_as_the_bug_it_is(
        self, name: str, bug: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here, there = self.transports()

        def refuse(*args: object, **options: object) -> None:
            raise bug("no such argument")

        if name in ("get_unique_id", "init"):
            monkeypatch.setattr(FakeNccl, name, refuse)
            with pytest.raises(bug, match="no such argument"):
                here.connect(Side.SENDER, "c", here.offer(), 1.0, NEVER)
            return
        sender, receiver = self.pair(here, there)
        monkeypatch.setattr(FakeCommunicator, name, refuse)
        with pytest.raises(bug, match="no such argument"):
            sender.send((0,), 1.0)
        monkeypatch.undo()
        for call in (sender.send, receiver.receive):
            with pytest.raises(TransferError):
                call((0,), 0.5)
        move(*self.pair(here, there, "again"), (0,), (0,))

    def test_workers_that_cut_messages_differently_say_so(self) -> None:
        here = self.a_transport(a_pool())
        there = self.a_transport(a_pool(), slot_bytes=7 * PAGE_BYTES)
        with pytest.raises(TransferError, match=r"7 pages there, 5 here.*versions"):
            here.connect(Side.SENDER, "c", there.offer(), 1.0, NEVER)

    def test_both_ends_have_the_receiver_s_number_of_thread_blocks(self) -> None:
        here, there = self.a_transport(a_pool(), max_ctas=2), self.a_transport(a_pool())
        self.pair(here, there)
        assert [config.max_ctas for each in self.libraries for config in each.configs] == [4, 4]

    def test_warming_up_leaves_the_pool_as_it_was_and_its_lane_for_the_first_transfer(self) -> None:
        source, target = self.pools()
        before = source.layers.clone()
        here, there = self.a_transport(source), self.a_transport(target)
        here.warm_up()
        assert torch.equal(source.layers, before)
        warmed = here.staging_bytes
        move(*self.pair(here, there), (0, 1), (0, 1))
        assert here.staging_bytes == warmed

    def test_warming_up_runs_the_copies_of_few_pages_and_of_many(self) -> None:
        """Torch has a kernel for each, loaded when it first runs."""
        copied: list[int] = []

        class Noted(LayerRows):
            def gather(self, chunk: Chunk, index: torch.Tensor, slot: torch.Tensor) -> None:
                copied.append(pages_in(chunk))
                super().gather(chunk, index, slot)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nccl, "LayerRows", Noted)
            transport = self.a_transport(a_pool(), slot_bytes=1000 * PAGE_BYTES)
        transport.warm_up()
        assert copied == [1, 64]

    def test_a_communicator_that_nobody_meets_is_freed(self) -> None:
        transport = self.a_transport(a_pool())
        with pytest.raises(TransferError, match="did not connect"):
            transport.connect(Side.RECEIVER, "lonely", transport.offer(), 0.1, NEVER)
        assert self.libraries[0].num_open == 0

    def test_a_communicator_of_one_rank_copies_pages_to_itself(self) -> None:
        pool = KVPool(num_layers=8, total_pages=64, num_kv_heads=1, head_dim=2)
        for layer in pool.layers:
            layer.copy_(torch.rand(layer.shape))
        streams = FakeStreams(jitter_seconds=0.001)
        self.devices_made.append(streams)
        wanted = [layer[[3, 1, 4, 15, 9, 2]] for layer in pool.layers]
        with NcclLoop(
            pool, self.network.library(), streams, max_ctas=2, slot_bytes=4 * PAGE_BYTES
        ) as loop:
            streams.made[2].jitter_seconds = 0.01  # the scatters
            for targets in ((20, 22, 21, 30, 31, 32), (40, 41, 42, 43, 44, 45)):
                assert loop.copy((3, 1, 4, 15, 9, 2), targets, 10.0) == 8 * 6 * PAGE_BYTES
                for layer, expected in zip(pool.layers, wanted, strict=True):
                    assert torch.equal(layer[list(targets)], expected)

    def test_many_pairs_move_at_once(self) -> None:
        source, target = self.pools()
        here, there = self.a_transport(source), self.a_transport(target)
        pairs = [self.pair(here, there, str(number)) for number in range(6)]
        with ThreadPoolExecutor(6) as executor:
            jobs = [
                executor.submit(move, *pair, range(8 * n, 8 * n + 8), range(8 * n + 8, 8 * n + 16))
                for n, pair in enumerate(pairs)
            ]
            for job in jobs:
                job.result(20)
        assert torch.equal(target.layers[:, 8:56], source.layers[:, :48])


def test_every_page_of_every_layer_is_in_one_message_that_fits_a_slot() -> None:
    random = Random(1)
    for _ in range(200):
        num_layers, num_pages, slot_pages = (random.randint(1, high) for high in (40, 70, 90))
        chunks = chunks_of(num_layers, num_pages, slot_pages)
        parts = [part for chunk in chunks for part in chunk]
        moved = [(part.layer, page) for part in parts for page in range(part.start, part.stop)]
        assert moved == [(layer, page) for layer in range(num_layers) for page in range(num_pages)]
        for chunk in chunks:
            assert pages_in(chunk) <= slot_pages
            rows = [row for part in chunk for row in range(part.rows.start, part.rows.stop)]
            assert rows == list(range(pages_in(chunk)))


def test_a_llada_layer_of_2048_tokens_is_one_message_and_eight_of_dream() -> None:
    assert len(chunks_of(32, 128, SLOT_BYTES // (2 * 16 * 32 * 128 * 2))) == 32
    assert len(chunks_of(28, 128, SLOT_BYTES // (2 * 16 * 4 * 128 * 2))) == 4


async def test_a_block_moves_between_two_workers_by_nccl() -> None:
    network, devices = FakeNetwork(), []

    def make_transport(pool: Any) -> NcclTransport:
        devices.append(FakeStreams())
        return NcclTransport(
            pool, network.library(), devices[-1], max_ctas=4, pairs_each_way=8, slot_bytes=1000
        )

    sends = {"role": Role.PREFILL, "worker_id": "sender", "make_transport": make_transport}
    receives = {"role": Role.DECODE, "worker_id": "receiver", "make_transport": make_transport}
    ids = a_sequence()
    async with a_worker(**sends) as sender, a_worker(**receives) as receiver, a_client() as client:
        for name in ("r1", "r2"):
            first = await client.start(sender, a_start(sender, name, ids=ids, hands_over=True))
            await first.until(PassRan)
            start = a_decode(receiver, sender, first.overlay(ids), name)
            second = await client.start(receiver, start)
            assert (await second.rest())[-1] == "completed"
            assert (await first.rest())[-1] == "kv_sent"
            assert first.tokens() + second.tokens() == toy_answer(ids, range(20, 36))
            staging = await client.metric(sender, "sangam_worker_kv_staging_bytes")
            assert staging == 2 * 3 * PAGE_BYTES + 8 * 64
    for device in devices:
        device.close()


# -- the library, and who gets it -----------------------------------------------------------------


@pytest.mark.skipif(not is_installed(), reason=f"no GPU is needed for: {INSTALL}")
def test_every_call_is_one_that_the_installed_release_takes() -> None:
    signature("Communicator.init").bind(2, 0, object(), object())
    with pytest.raises(TypeError):
        signature("NCCLConfig").bind(max_blocks=1)
    import nccl.core

    unique_id = nccl.core.get_unique_id(empty=True)
    assert len(bytes(nccl.core.UniqueId.from_bytes(bytes(unique_id)))) == 128
    config = nccl.core.NCCLConfig(blocking=False, max_ctas=4)
    assert (config.blocking, config.max_ctas) == (False, 4)


def settings(**fields: Any) -> WorkerSettings:
    return WorkerSettings(internal_token=SecretStr("t"), **fields)


def test_nccl_is_for_gpus_and_gloo_for_the_rest_unless_it_is_set() -> None:
    assert not settings().uses_nccl
    assert settings(device="cuda:0").uses_nccl
    assert not settings(device="cuda:0", kv_transport="gloo").uses_nccl
    pool = KVPool(num_layers=2, total_pages=4, num_kv_heads=1, head_dim=16)
    prepare_transport(settings())
    assert open_transport(settings(), pool).name == "gloo"


def test_a_worker_without_nccl_says_so_before_it_loads_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    monkeypatch.setenv("NCCL_RAS_ENABLE", "1")  # so that it is put back
    monkeypatch.delenv("NCCL_RAS_ENABLE")
    for blocked, message in (
        ("nccl.core", "from the checkout: pip install"),
        (None, "libnccl.so.2"),
    ):
        if blocked is not None:
            monkeypatch.setitem(sys.modules, blocked, None)
        else:
            monkeypatch.setitem(sys.modules, "nccl.core", NcclWithoutALibrary())
        with pytest.raises(ConfigurationError, match=message):
            prepare_transport(settings(device="cuda:0"), TorchBuild("2.13.0", "13.0", 1))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
    assert os.environ["NCCL_RAS_ENABLE"] == "0"
    with pytest.raises(ConfigurationError, match="needs a CUDA device, not cpu"):
        load_nccl(torch.device("cpu"))


class NcclWithoutALibrary(ModuleType):
    """What nccl4py is where no NCCL is."""

    libnccl = None

    def __init__(self) -> None:
        super().__init__("nccl.core")

    def get_version(self) -> "NcclWithoutALibrary":
        return self
