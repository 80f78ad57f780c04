"""NCCL transports without GPUs: on one fake network, each with side streams of its own."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.worker.fakes import ToyPool
from tests.worker.nccl_fake import FakeNccl, FakeNetwork
from tests.worker.side_streams_fake import FakeStreams
from tests.worker.transport_checks import TransportRig

from sangam_worker.transfer.memory import TRANSFERS_EACH_WAY
from sangam_worker.transfer.nccl import NcclTransport
from sangam_worker.transfer.protocol import KVChannel

PAGE_BYTES = 2 * 16 * 2 * 4
"""Of a toy pool in float32, in one layer."""


class NcclRig(TransportRig):
    """Transports on one network, each with a device of its own.

    Attributes:
        jitter_seconds: everything that a device does begins up to this much late.
        slot_pages: pages of a staging slot.
    """

    jitter_seconds = 0.0
    slot_pages = 5

    @pytest.fixture(autouse=True)
    def _network(self) -> Iterator[None]:
        self.network = FakeNetwork()
        self.devices_made: list[FakeStreams] = []
        self.libraries: list[FakeNccl] = []
        yield
        for device in self.devices_made:
            device.close()
        assert self.network.misuses == []

    def a_transport(
        self,
        pool: ToyPool,
        slot_bytes: int | None = None,
        max_ctas: int = 4,
        transfers_each_way: int = TRANSFERS_EACH_WAY,
        pairs_each_way: int = TRANSFERS_EACH_WAY,
    ) -> NcclTransport:
        self.devices_made.append(FakeStreams(self.jitter_seconds))
        self.libraries.append(self.network.library())
        return NcclTransport(
            pool,
            self.libraries[-1],
            self.devices_made[-1],
            max_ctas=max_ctas,
            pairs_each_way=pairs_each_way,
            slot_bytes=slot_bytes or self.slot_pages * PAGE_BYTES,
            transfers_each_way=transfers_each_way,
        )

    def transports(self, **options: int) -> tuple[NcclTransport, NcclTransport]:
        source, target = self.pools()
        return self.a_transport(source, **options), self.a_transport(target, **options)

    @property
    def lane_bytes(self) -> int:
        """Two slots, and page numbers for the whole pool."""
        return 2 * self.slot_pages * PAGE_BYTES + 8 * 64

    def a_pair(self) -> tuple[KVChannel, KVChannel]:
        return self.pair(*self.transports())


def until(is_met: Any, seconds: float = 10.0) -> bool:
    """Whether a condition comes to be met."""
    deadline = time.monotonic() + seconds
    while not is_met():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.002)
    return True
