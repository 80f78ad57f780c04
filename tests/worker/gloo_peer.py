"""The other process of ``test_gloo``: one end of a channel, then as many transfers as told.

Reads one JSON object a line: ``{"connect": [side, communicator, offer]}``, ``{"send": pages}``,
``{"receive": pages}``, ``{"stall_at": layer}``; answers each with one line. A receiver says its
offer first. A stalled transfer says so and waits to be killed.
"""

import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tests.worker.fakes import ToyPool

from sangam_core.errors import TransferError
from sangam_worker.transfer.gloo import GlooTransport
from sangam_worker.transfer.protocol import Side

NUM_LAYERS = 8


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
            say("stalled")
            signal.pause()


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


def main() -> None:
    pool = StallingPool(num_layers=NUM_LAYERS)
    torch.manual_seed(1)
    pool.layers.copy_(torch.rand(pool.layers.shape))
    transport = GlooTransport(pool, "127.0.0.1")
    say(transport.offer())
    channel: Any = None
    for line in sys.stdin:
        ((verb, argument),) = json.loads(line).items()
        try:
            if verb == "connect":
                side, communicator, offer = argument
                channel = transport.connect(Side(side), communicator, offer, 20.0)
                say("connected")
            elif verb == "stall_at":
                pool.stall_at = argument
                say("will stall")
            else:
                say(getattr(channel, verb)(argument, 20.0))
        except TransferError as error:
            channel = None
            say({"error": str(error)})


if __name__ == "__main__":
    main()
