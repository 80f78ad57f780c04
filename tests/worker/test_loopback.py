"""The loopback keeps the protocol of KV transports."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.worker.fakes import NEVER, ToyPool
from tests.worker.loopback import LoopbackHub, LoopbackTransport

from sangam_core.errors import TransferError
from sangam_worker.transfer.protocol import KVChannel, Side


def connected(pools: tuple[ToyPool, ToyPool]) -> tuple[LoopbackHub, KVChannel, KVChannel]:
    hub = LoopbackHub()
    sender, receiver = (LoopbackTransport(pool, hub) for pool in pools)
    with ThreadPoolExecutor(1) as executor:
        other = executor.submit(sender.connect, Side.SENDER, "c", "", 5.0, NEVER)
        here = receiver.connect(Side.RECEIVER, "c", receiver.offer(), 5.0, NEVER)
        return hub, other.result(), here


def test_loopback_moves_pages_of_every_layer() -> None:
    source, target = ToyPool(), ToyPool()
    source.layers.copy_(torch.arange(source.layers.numel()).reshape(source.layers.shape))
    _, sender, receiver = connected((source, target))
    with ThreadPoolExecutor(1) as executor:
        sent = executor.submit(sender.send, (3, 1), 5.0)
        assert receiver.receive((0, 2), 5.0) == sent.result() == 2 * 2 * 2 * 16 * 2 * 4
    for layer in range(2):
        assert torch.equal(target.gather(layer, (0, 2)), source.gather(layer, (3, 1)))


def test_loopback_calls_end_when_aborted_cut_or_late() -> None:
    hub, sender, receiver = connected((ToyPool(), ToyPool()))
    with pytest.raises(TransferError, match="deadline"):
        receiver.receive((0,), 0.01)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(receiver.receive, (0,), 30.0)
        sender.abort()
        with pytest.raises(TransferError, match="aborted"):
            waiting.result(5)
    hub, sender, receiver = connected((ToyPool(), ToyPool()))
    hub.cut_all()
    with pytest.raises(TransferError, match="aborted"):
        sender.send((0,), 5.0)


def test_loopback_does_not_connect_alone() -> None:
    transport = LoopbackTransport(ToyPool(), LoopbackHub())
    with pytest.raises(TransferError, match="deadline"):
        transport.connect(Side.SENDER, "c", "", 0.01, NEVER)
