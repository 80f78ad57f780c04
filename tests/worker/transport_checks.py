"""What every KV transport must do: run on gloo, on NCCL's fake, and on NCCL where two GPUs are.

Both ends in this process (``TransportChecks``), and one in another that is killed or frozen
(``ProcessChecks``, with ``transport_peer``).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.fakes import NEVER, ToyPool

from sangam_core.errors import TransferError
from sangam_worker.transfer.protocol import KVChannel, KVTransport, Side

NUM_LAYERS = 8
ROOT = Path(__file__).parents[2]


def a_pool(dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> ToyPool:
    """A pool with something on every page."""
    pool = ToyPool(num_layers=NUM_LAYERS)
    torch.manual_seed(seed)
    pool.layers = torch.rand(pool.layers.shape).to(dtype).to(device)
    return pool


def move(
    sender: KVChannel, receiver: KVChannel, sources: Any, targets: Any, seconds: float = 10.0
) -> int:
    """One transfer; both ends must agree on its bytes."""
    with ThreadPoolExecutor(1) as executor:
        sent = executor.submit(sender.send, sources, seconds)
        num_bytes = receiver.receive(targets, seconds)
        assert sent.result() == num_bytes
    return num_bytes


class TransportRig:
    """Subclasses say how a transport is made.

    Attributes:
        devices: of the sender and the receiver.
        connect_seconds: longest time that connecting may take.
    """

    devices = ("cpu", "cpu")
    connect_seconds = 10.0

    def a_transport(self, pool: ToyPool) -> KVTransport:
        raise NotImplementedError

    def pools(self, dtype: torch.dtype = torch.float32) -> tuple[ToyPool, ToyPool]:
        """The sender's and the receiver's, other numbers in each."""
        here, there = self.devices
        return a_pool(dtype, here, seed=1), a_pool(dtype, there, seed=2)

    def transports(self) -> tuple[KVTransport, KVTransport]:
        source, target = self.pools()
        return self.a_transport(source), self.a_transport(target)

    def pair(
        self, sender: KVTransport, receiver: KVTransport, name: str = "one"
    ) -> tuple[KVChannel, KVChannel]:
        """Both ends of a channel."""
        with ThreadPoolExecutor(1) as executor:
            offer, seconds = receiver.offer(), self.connect_seconds
            other = executor.submit(sender.connect, Side.SENDER, name, offer, seconds, NEVER)
            here = receiver.connect(Side.RECEIVER, name, offer, seconds, NEVER)
            return other.result(), here


class TransportChecks(TransportRig):
    """Subclasses add what is peculiar to a transport."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_pages_of_every_layer_arrive_where_they_are_to_and_nowhere_else(
        self, dtype: torch.dtype
    ) -> None:
        source, target = self.pools(dtype)
        before, expected = target.layers.cpu().clone(), source.layers.cpu()
        sender, receiver = self.pair(self.a_transport(source), self.a_transport(target))
        for sources, targets in (((5, 2, 9), (0, 63, 1)), ((7,), (2,)), ((1, 0), (4, 3))):
            num_bytes = move(sender, receiver, sources, targets)
            assert num_bytes == NUM_LAYERS * len(sources) * 2 * 16 * 2 * dtype.itemsize
            before[:, list(targets)] = expected[:, list(sources)]
            assert torch.equal(target.layers.cpu(), before)
        assert torch.equal(source.layers.cpu(), expected)
        sender.abort()
        receiver.abort()

    def test_a_channel_goes_one_way_and_another_the_other_at_the_same_time(self) -> None:
        pools = self.pools()
        here, there = (self.a_transport(pool) for pool in pools)
        one, other = self.pair(here, there, "one"), self.pair(there, here, "other")
        wanted = [pool.layers[:, :4].cpu().clone() for pool in pools]
        with ThreadPoolExecutor(1) as executor:
            for _ in range(5):
                back = executor.submit(move, *other, range(4), range(8, 12))
                move(*one, range(4), range(20, 24))
                back.result()
        assert torch.equal(pools[1].layers[:, 20:24].cpu(), wanted[0])
        assert torch.equal(pools[0].layers[:, 8:12].cpu(), wanted[1])
        for channel in (*one, *other):
            channel.abort()

    def test_nobody_there_ends_connecting_at_its_deadline(self) -> None:
        _, transport = self.transports()
        began = time.monotonic()
        with pytest.raises(TransferError, match="did not connect"):
            transport.connect(Side.RECEIVER, "lonely", transport.offer(), 0.3, NEVER)
        assert time.monotonic() - began < 5

    def test_connecting_that_nobody_wants_any_more_ends_at_once(self) -> None:
        _, transport = self.transports()
        given_up, offer = threading.Event(), transport.offer()
        with ThreadPoolExecutor(1) as executor:
            connecting = executor.submit(
                transport.connect, Side.RECEIVER, "lonely", offer, 60.0, given_up
            )
            with pytest.raises(FutureTimeoutError):
                connecting.result(0.2)
            given_up.set()
            with pytest.raises(TransferError, match=r"did not connect.*aborted"):
                connecting.result(10)

    def test_an_offer_that_is_none_is_an_error_of_the_transfer(self) -> None:
        transport, _ = self.transports()
        for offer in ("nonsense", ""):
            with pytest.raises(TransferError, match="offer"):
                transport.connect(Side.SENDER, "c", offer, 1.0, NEVER)

    def test_an_end_that_is_dropped_costs_the_peer_s_call_and_no_other_pair_s(self) -> None:
        here, there = self.transports()
        sender, receiver = self.pair(here, there, "one")
        other_sender, other_receiver = self.pair(here, there, "two")
        with ThreadPoolExecutor(2) as executor:
            waiting = executor.submit(receiver.receive, (0,), 2.0)
            others = executor.submit(other_receiver.receive, (0,), 60.0)
            sender.abort()
            assert failed(waiting)
            assert other_sender.send((0,), 10.0) == others.result(10)
        for channel in (receiver, other_sender, other_receiver):
            channel.abort()

    def test_a_peer_that_does_nothing_costs_the_deadline_and_no_more(self) -> None:
        here, there = self.transports()
        sender, receiver = self.pair(here, there)
        began = time.monotonic()
        with pytest.raises(TransferError):
            receiver.receive((1, 2), 0.4)
        assert 0.3 < time.monotonic() - began < 5
        with pytest.raises(TransferError, match="aborted"):
            receiver.receive((1, 2), 0.4)
        sender.abort()
        sender, receiver = self.pair(here, there, "a new one")
        move(sender, receiver, (1,), (1,))
        sender.abort()
        receiver.abort()

    def test_an_end_that_is_aborted_in_use_ends_its_call_by_the_call_s_deadline(self) -> None:
        here, there = self.transports()
        sender, receiver = self.pair(here, there)
        with ThreadPoolExecutor(1) as executor:
            is_waiting = threading.Event()

            def wait() -> int:
                is_waiting.set()
                return receiver.receive((0,), 1.0)

            waiting = executor.submit(wait)
            assert is_waiting.wait(10)
            receiver.abort()
            assert failed(waiting)
        with pytest.raises(TransferError):
            sender.send((0,), 1.0)

    def test_aborting_again_or_from_many_threads_changes_nothing(self) -> None:
        here, there = self.transports()
        sender, receiver = self.pair(here, there)
        with ThreadPoolExecutor(8) as executor:
            for future in [executor.submit(each.abort) for each in (sender, receiver) * 8]:
                future.result(10)
        for call in (sender.send, receiver.receive):
            with pytest.raises(TransferError):
                call((0,), 0.5)
        assert here.ailment() is None
        here.close()
        there.close()


def failed(call: "Future[int]") -> bool:
    """Whether a call ends by itself, and as a transfer's failure."""
    return isinstance(call.exception(20), TransferError)


class Peer:
    """Another process with one end of a channel."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.transport_peer", kind],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, verb: str, argument: object = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({verb: argument}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)

    def ask(self, verb: str, argument: object = None) -> Any:
        self.say(verb, argument)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class ProcessChecks:
    """The same between two processes.

    Attributes:
        kind: the transport's name.
        device: this process's; ``transport_peer`` has its own.
        notice_seconds: how soon a call ends whose peer has died.
        deadline_seconds: of such calls.
    """

    kind = ""
    device = "cpu"
    notice_seconds = 5.0
    deadline_seconds = 60.0

    def a_transport(self, pool: ToyPool) -> KVTransport:
        raise NotImplementedError

    def an_end(self) -> KVTransport:
        return self.a_transport(a_pool(device=self.device))

    @contextmanager
    def a_peer(self) -> Iterator[Peer]:
        peer = Peer(self.kind)
        try:
            assert peer.hear() == "ready"
            yield peer
        finally:
            for stream in (peer.process.stdin, peer.process.stdout):
                assert stream is not None
                stream.close()
            peer.kill()

    def receive_from(self, peer: Peer, transport: KVTransport, name: str = "one") -> KVChannel:
        """This process's end, the peer being the sender."""
        offer = transport.offer()
        peer.say("connect", ["sender", name, offer])
        channel = transport.connect(Side.RECEIVER, name, offer, 30.0, NEVER)
        assert peer.hear() == "connected"
        return channel

    def send_to(self, peer: Peer, transport: KVTransport, name: str = "one") -> KVChannel:
        """This process's end, the peer being the receiver."""
        offer = peer.ask("offer")
        peer.say("connect", ["receiver", name, offer])
        channel = transport.connect(Side.SENDER, name, offer, 30.0, NEVER)
        assert peer.hear() == "connected"
        return channel

    def test_pages_move_between_processes_in_both_directions(self) -> None:
        mine = a_pool(device=self.device)
        transport = self.a_transport(mine)
        with self.a_peer() as peer:
            there = self.receive_from(peer, transport, "one")
            peer.say("send", [5, 2, 9])
            num_bytes = there.receive((0, 1, 2), 20.0)
            assert peer.hear() == num_bytes == NUM_LAYERS * 3 * 2 * 16 * 2 * 4
            theirs = a_pool(seed=1).layers
            assert torch.equal(mine.layers[:, [0, 1, 2]].cpu(), theirs[:, [5, 2, 9]])
            back = self.send_to(peer, transport, "two")
            peer.say("receive", [7, 8])
            assert back.send((0, 1), 20.0) == peer.hear()
            there.abort()
            back.abort()

    def test_a_killed_sender_is_noticed_and_a_new_one_is_served(self) -> None:
        transport = self.an_end()
        with self.a_peer() as peer:
            channel = self.receive_from(peer, transport)
            with ThreadPoolExecutor(1) as executor:
                waiting = executor.submit(channel.receive, (1, 2), self.deadline_seconds)
                self.dies(peer, waiting, "send")
        with self.a_peer() as peer:
            channel = self.receive_from(peer, transport, "two")
            peer.say("send", [1, 2])
            assert channel.receive((1, 2), 20.0) == peer.hear()
            channel.abort()

    def test_a_killed_receiver_is_noticed(self) -> None:
        transport = self.an_end()
        with self.a_peer() as peer:
            channel = self.send_to(peer, transport)
            with ThreadPoolExecutor(1) as executor:
                waiting = executor.submit(channel.send, (1, 2), self.deadline_seconds)
                self.dies(peer, waiting, "receive")

    def dies(self, peer: Peer, waiting: "Future[int]", verb: str) -> None:
        """Kill a peer in the middle of a transfer; our call must end soon enough."""
        assert peer.ask("stall_at", 4) == "will stall"
        peer.say(verb, [1, 2])
        assert peer.hear() == "stalled"
        peer.kill()
        began = time.monotonic()
        assert failed(waiting)
        assert time.monotonic() - began < self.notice_seconds

    def test_a_frozen_peer_costs_the_deadline_and_no_more(self) -> None:
        transport = self.an_end()
        with self.a_peer() as peer:
            channel = self.receive_from(peer, transport)
            peer.process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(TransferError):
                channel.receive((1, 2), 0.5)
            assert 0.4 < time.monotonic() - began < 5
            with pytest.raises(TransferError, match="aborted"):
                channel.receive((1, 2), 0.5)
