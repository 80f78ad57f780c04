"""An exchange without a worker around it: what it asks of peers, and how its transfers ended."""

from concurrent.futures import Future
from typing import Protocol

from tests.worker.fakes import ToyPool
from tests.worker.loopback import LoopbackHub, LoopbackTransport

from sangam_core.placement import Role
from sangam_core.wire import BlockKey, KVSource, LossReason
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.standing import Standing
from sangam_worker.tracking import Moved
from sangam_worker.transfer.exchange import KVExchange
from sangam_worker.transfer.pool import KVGeometry
from sangam_worker.transfer.wire import PairClosed, TransferAccepted, TransferRequest


class Ended:
    """Stands for the GPU thread; notes how transfers ended."""

    def __init__(self) -> None:
        self.results: dict[BlockKey, Moved | LossReason] = {}

    def pin(self, key: BlockKey) -> "Future[tuple[int, ...] | None]":
        raise NotImplementedError

    def unpin(self, key: BlockKey) -> None:
        raise NotImplementedError

    def transfer_ended(self, key: BlockKey, result: Moved | LossReason) -> None:
        self.results[key] = result


class Peers(Protocol):
    """Other workers."""

    async def ask(self, url: str, request: TransferRequest, seconds: float) -> TransferAccepted: ...

    async def tell(self, url: str, closed: PairClosed) -> None: ...


def an_exchange(
    peers: Peers,
    ended: Ended,
    deadline_seconds: float,
    transport: LoopbackTransport | None = None,
) -> KVExchange:
    """A decode worker's."""
    metrics, pool = WorkerMetrics(), ToyPool()
    return KVExchange(
        standing=Standing(worker_id="w", url="", model="small", role=Role.DECODE, metrics=metrics),
        blocks=ended,
        transport=transport or LoopbackTransport(pool, LoopbackHub()),
        geometry=KVGeometry.of(pool),
        ask_sender=peers.ask,
        tell_closed=peers.tell,
        metrics=metrics,
        deadline_seconds=deadline_seconds,
    )


def fetch(exchange: KVExchange, name: str, peer: str | None = None) -> BlockKey:
    """From a peer, by default one of the same name."""
    key, peer = BlockKey(request_id=name, block=0), peer or name
    exchange.fetch(key, KVSource(worker_id=peer, epoch="e", url=f"http://{peer}"), (1, 2))
    return key
