"""The other process of ``transport_checks``: one end of a channel, then as many transfers as told.

``python -m tests.worker.transport_peer gloo|nccl``. Says "ready", then reads one JSON object a
line: ``{"offer": null}``, ``{"connect": [side, communicator, offer]}``, ``{"send": pages}``,
``{"receive": pages}``, ``{"stall_at": layer}``; answers each with one line. A stalled transfer
says so and waits to be killed.
"""

import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tests.worker.fakes import NEVER, ToyPool
from tests.worker.transport_checks import a_pool

from sangam_core.errors import TransferError
from sangam_worker.transfer.choice import nccl_transport
from sangam_worker.transfer.gloo import GlooTransport
from sangam_worker.transfer.protocol import KVTransport, Side


class StallingPool(ToyPool):
    """Stops for good when it comes to a layer."""

    stall_at: int | None = None

    def gather(self, layer: int, pages: Sequence[int]) -> torch.Tensor:
        self._stall(layer, pages)
        return super().gather(layer, pages)

    def scatter(self, layer: int, pages: Sequence[int], tensor: torch.Tensor) -> None:
        self._stall(layer, pages)
        super().scatter(layer, pages, tensor)

    def _stall(self, layer: int, pages: Sequence[int]) -> None:
        if layer == self.stall_at and len(pages) > 1:
            stall()


def stall() -> None:
    say("stalled")
    signal.pause()


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


def a_stalling_pool(device: str) -> StallingPool:
    pool = StallingPool()
    pool.layers, pool.num_layers = a_pool(device=device, seed=1).layers, len(a_pool().layers)
    return pool


def main(kind: str) -> None:
    transport: KVTransport
    if kind == "gloo":
        pool = a_stalling_pool("cpu")
        transport = GlooTransport(pool, "127.0.0.1")
    else:
        pool = a_stalling_pool("cuda:1")
        transport = nccl_transport(pool, max_ctas=4, pairs_each_way=8)
    say("ready")
    channel: Any = None
    for line in sys.stdin:
        ((verb, argument),) = json.loads(line).items()
        try:
            if verb == "offer":
                say(transport.offer())
            elif verb == "connect":
                side, communicator, offer = argument
                channel = transport.connect(Side(side), communicator, offer, 30.0, NEVER)
                say("connected")
            elif verb == "stall_at":
                pool.stall_at = argument
                say("will stall")
            elif kind == "nccl" and pool.stall_at is not None:
                stall()  # kernels cannot: the other end waits for a peer that never comes
            else:
                say(getattr(channel, verb)(argument, 20.0))
        except TransferError as error:
            channel = None
            say({"error": str(error)})


if __name__ == "__main__":
    main(sys.argv[1])
