"""KV over real gloo: between two processes, one of which is killed, and within one."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.fakes import ToyPool
from tests.worker.gloo_peer import NUM_LAYERS

from sangam_core.errors import ConfigurationError, TransferError
from sangam_worker.transfer.gloo import GlooTransport
from sangam_worker.transfer.protocol import KVChannel, Side

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]


def a_transport(pool: ToyPool | None = None) -> GlooTransport:
    return GlooTransport(pool or ToyPool(num_layers=NUM_LAYERS), HOST)


class Peer:
    """Another process with one end of a channel."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.gloo_peer"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.offer = self.hear()

    def say(self, verb: str, argument: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({verb: argument}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has ended"
        return json.loads(line)

    def ask(self, verb: str, argument: object) -> Any:
        self.say(verb, argument)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def a_peer() -> Iterator[Peer]:
    peer = Peer()
    try:
        yield peer
    finally:
        for stream in (peer.process.stdin, peer.process.stdout):
            assert stream is not None
            stream.close()
        peer.kill()


def receive_from(peer: Peer, transport: GlooTransport, communicator: str) -> KVChannel:
    """This process's end, the peer being the sender."""
    peer.say("connect", ["sender", communicator, transport.offer()])
    channel = transport.connect(Side.RECEIVER, communicator, transport.offer(), 20.0)
    assert peer.hear() == "connected"
    return channel


def pair(sender: GlooTransport, receiver: GlooTransport, name: str) -> tuple[KVChannel, KVChannel]:
    """Both ends in this process."""
    with ThreadPoolExecutor(1) as executor:
        offer = receiver.offer()
        other = executor.submit(sender.connect, Side.SENDER, name, offer, 10.0)
        here = receiver.connect(Side.RECEIVER, name, offer, 10.0)
        return other.result(), here


@pytest.mark.integration
def test_pages_move_between_processes_in_both_directions() -> None:
    mine = ToyPool(num_layers=NUM_LAYERS)
    transport = a_transport(mine)
    with a_peer() as peer:
        there = receive_from(peer, transport, "one")
        peer.say("send", [5, 2, 9])
        num_bytes = there.receive((0, 1, 2), 20.0)
        assert peer.hear() == num_bytes == NUM_LAYERS * 3 * 2 * 16 * 2 * 4
        torch.manual_seed(1)
        theirs = torch.rand(mine.layers.shape)
        assert torch.equal(mine.layers[:, [0, 1, 2]], theirs[:, [5, 2, 9]])
        peer.say("connect", ["receiver", "two", peer.offer])
        back = transport.connect(Side.SENDER, "two", peer.offer, 20.0)
        assert peer.hear() == "connected"
        peer.say("receive", [7, 8])
        assert back.send((0, 1), 20.0) == peer.hear()
        there.abort()
        back.abort()


@pytest.mark.integration
def test_a_killed_sender_is_noticed_at_once_and_a_new_one_is_served() -> None:
    transport = a_transport()
    with a_peer() as peer:
        channel = receive_from(peer, transport, "one")
        assert peer.ask("stall_at", 4) == "will stall"
        peer.say("send", [1, 2])
        with ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(channel.receive, (1, 2), 60.0)
            assert peer.hear() == "stalled"
            peer.kill()
            began = time.monotonic()
            with pytest.raises(TransferError, match="gloo"):
                waiting.result(30)
            assert time.monotonic() - began < 5
    with a_peer() as peer:
        channel = receive_from(peer, transport, "two")
        peer.say("send", [1, 2])
        assert channel.receive((1, 2), 20.0) == peer.hear()
        channel.abort()


@pytest.mark.integration
def test_a_killed_receiver_is_noticed_at_once() -> None:
    transport = a_transport()
    with a_peer() as peer:
        peer.say("connect", ["receiver", "one", peer.offer])
        channel = transport.connect(Side.SENDER, "one", peer.offer, 20.0)
        assert peer.hear() == "connected"
        assert peer.ask("stall_at", 2) == "will stall"
        peer.say("receive", [1, 2])
        with ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(channel.send, (1, 2), 60.0)
            assert peer.hear() == "stalled"
            peer.kill()
            began = time.monotonic()
            with pytest.raises(TransferError, match="gloo"):
                waiting.result(30)
            assert time.monotonic() - began < 5


@pytest.mark.integration
def test_a_frozen_peer_costs_the_deadline_and_no_more() -> None:
    transport = a_transport()
    with a_peer() as peer:
        channel = receive_from(peer, transport, "one")
        peer.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TransferError, match="gloo"):
            channel.receive((1, 2), 0.5)
        assert 0.4 < time.monotonic() - began < 5
        with pytest.raises(TransferError, match="aborted"):
            channel.receive((1, 2), 0.5)


def test_a_pair_serves_many_transfers_and_every_number_format() -> None:
    source, target = ToyPool(), ToyPool()
    for pool in (source, target):
        pool.layers = pool.layers.to(torch.bfloat16)
    source.layers.copy_(torch.rand(source.layers.shape))
    sender, receiver = pair(a_transport(source), a_transport(target), "c")
    with ThreadPoolExecutor(1) as executor:
        for pages in ((1, 2, 3), (9,), (4, 5)):
            sent = executor.submit(sender.send, pages, 10.0)
            assert receiver.receive(pages, 10.0) == sent.result()
            for layer in range(2):
                assert torch.equal(target.gather(layer, pages), source.gather(layer, pages))
    sender.abort()
    receiver.abort()


def test_nobody_there_ends_connecting_at_its_deadline() -> None:
    transport = a_transport()
    began = time.monotonic()
    with pytest.raises(TransferError, match="did not connect"):
        transport.connect(Side.RECEIVER, "lonely", transport.offer(), 0.3)
    assert time.monotonic() - began < 5


def test_an_offer_that_is_no_address_is_an_error_of_the_transfer() -> None:
    with pytest.raises(TransferError, match="HOST:PORT"):
        a_transport().connect(Side.SENDER, "c", "nonsense", 1.0)


def test_an_end_that_is_dropped_ends_the_peer_s_call_and_no_other_pair_s() -> None:
    here, there = a_transport(), a_transport()
    sender, receiver = pair(here, there, "one")
    other_sender, other_receiver = pair(here, there, "two")
    with ThreadPoolExecutor(2) as executor:
        waiting = executor.submit(receiver.receive, (0,), 60.0)
        others = executor.submit(other_receiver.receive, (0,), 60.0)
        sender.abort()
        with pytest.raises(TransferError, match="gloo"):
            waiting.result(10)
        assert other_sender.send((0,), 10.0) == others.result(10)
    for channel in (receiver, other_sender, other_receiver):
        channel.abort()


def test_aborting_an_end_in_use_ends_its_call_at_the_call_s_own_deadline() -> None:
    sender, receiver = pair(a_transport(), a_transport(), "one")
    with ThreadPoolExecutor(1) as executor:
        is_waiting = threading.Event()

        def wait() -> int:
            is_waiting.set()
            return receiver.receive((0,), 0.5)

        waiting = executor.submit(wait)
        assert is_waiting.wait(10)
        receiver.abort()
        with pytest.raises(TransferError):
            waiting.result(10)
    with pytest.raises(TransferError):
        sender.send((0,), 10.0)


def test_an_address_of_another_machine_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match=r"SANGAM_ADVERTISE_HOST '8\.8\.8\.8'"):
        GlooTransport(ToyPool(), "8.8.8.8")
