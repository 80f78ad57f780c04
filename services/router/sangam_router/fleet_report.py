"""The fleet in words and numbers: for ``/admin/fleet``, the fleet page and Prometheus.

Joins what the ledger counts (loads, pages, lines) with what workers say in their leases. Reads
Redis when asked; decides nothing.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from sangam_core.errors import Unavailable
from sangam_core.lease import DesiredState, LedgerKeys, WorkerLease
from sangam_core.placement import WorkerLoad
from sangam_router.fleet import FleetView
from sangam_router.fleet_watch import WatchStatus
from sangam_router.ledger import FleetSnapshot, Ledger, Line
from sangam_router.ledger.compatibility import Misfit
from sangam_router.ledger.scripts import Client


class FleetReport(Collector):
    """Reads and renders the state of the fleet.

    Args:
        timeout_seconds: of one look into Redis; after it the last known state is shown.
        watch_status: how the pods' watcher is.
    """

    def __init__(
        self,
        redis: Client,
        ledger: Ledger,
        fleet: FleetView,
        *,
        timeout_seconds: float,
        watch_status: Callable[[], WatchStatus] = WatchStatus,
    ) -> None:
        self._redis = redis
        self._ledger = ledger
        self._fleet = fleet
        self._keys: LedgerKeys = ledger.keys
        self._timeout_seconds = timeout_seconds
        self._watch_status = watch_status
        self._leases: dict[str, WorkerLease] = {}
        self._desired: dict[str, DesiredState] = {}
        self._refused: dict[str, dict[str, str]] = {}

    async def refresh(self) -> None:
        """Read leases, wishes and refusals anew; keeps what it has when Redis does not answer."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                snapshot = await self._ledger.snapshot()
                misfits = [each.worker_id for each in snapshot.incompatible]
                worker_ids = [*snapshot.leases, *misfits]
                pipe = self._redis.pipeline(transaction=False)
                for worker_id in worker_ids:
                    pipe.hgetall(self._keys.worker(worker_id))
                    pipe.hgetall(self._keys.desired(worker_id))
                    pipe.hgetall(self._keys.refused(worker_id))
                replies = await pipe.execute()
        except (Unavailable, TimeoutError, RedisError, OSError):
            return
        leases: dict[str, WorkerLease] = {}
        desired: dict[str, DesiredState] = {}
        refused: dict[str, dict[str, str]] = {}
        for worker_id, fields, wish, refusal in zip(
            worker_ids, replies[::3], replies[1::3], replies[2::3], strict=True
        ):
            lease = WorkerLease.from_fields(fields)
            if lease is not None:
                leases[worker_id] = lease
            desired[worker_id] = DesiredState.from_fields(wish)
            if refusal:
                refused[worker_id] = refusal
        self._leases, self._desired, self._refused = leases, desired, refused

    def body(self) -> dict[str, Any]:
        """The fleet as JSON."""
        snapshot = self._fleet.snapshot
        workers = snapshot.fleet.workers if snapshot else ()
        return {
            "is_ready": self._fleet.is_ready,
            "problem": self._fleet.problem(),
            "remark": self._fleet.remark(),
            "is_redis_reachable": self._ledger.is_reachable,
            "router": self._ledger.owner,
            "workers": [self._worker(worker) for worker in workers],
            "incompatible_workers": [
                self._misfit(misfit) for misfit in (snapshot.incompatible if snapshot else ())
            ],
            "watcher": asdict(self._watch_status()),
            "waiting": {
                "num_prefills": snapshot.num_waiting if snapshot else 0,
                "num_decodes": snapshot.num_pending_decodes if snapshot else 0,
                "pending_decode_pages": snapshot.fleet.pending_decode_pages if snapshot else 0,
                "num_prefills_here": self._ledger.num_waiting_here(Line.PREFILL),
                "num_decodes_here": self._ledger.num_waiting_here(Line.DECODE),
            },
        }

    def prometheus_targets(self) -> list[dict[str, Any]] | None:
        """Where every worker's ``/metrics`` is, for Prometheus' HTTP service discovery.

        Workers bind free ports, which nobody but the ledger knows. Those of another protocol or
        model, which an upgrade brings, are scraped too.

        Returns:
            One group a worker with its name and node; None before Redis has answered once:
            Prometheus then keeps what it had, while an empty list would clear it.
        """
        snapshot = self._fleet.snapshot
        if snapshot is None:
            return None
        return [
            {
                "targets": [urlsplit(lease.url).netloc],
                "labels": {
                    "worker": lease.name or lease.worker_id,
                    "node": lease.node,
                    "__meta_sangam_worker_id": lease.worker_id,
                    "__meta_sangam_boot_role": lease.boot_role.value,
                },
            }
            for lease in (
                *snapshot.leases.values(),
                *(misfit.lease for misfit in snapshot.incompatible if misfit.lease is not None),
            )
        ]

    def _worker(self, worker: WorkerLoad) -> dict[str, Any]:
        lease = self._leases.get(worker.worker_id) or self._fleet.leases[worker.worker_id]
        desired = self._desired.get(worker.worker_id, DesiredState())
        return {
            "worker_id": worker.worker_id,
            "name": lease.name or worker.worker_id,
            "node": lease.node,
            "epoch": worker.epoch,
            "url": lease.url,
            "role": worker.role.value,
            "desired_role": desired.role,
            "is_drain_desired": bool(desired.is_drained),
            "refused": self._refusal(worker.worker_id),
            "boot_role": lease.boot_role.value,
            "is_draining": worker.is_draining,
            "outstanding_prefill_tokens": worker.outstanding_prefill_tokens,
            "free_pages": worker.free_pages,
            "total_pages": worker.total_pages,
            "max_sequence_tokens": lease.max_sequence_tokens,
            "free_pages_at_worker": lease.free_pages,
            "num_waiting": lease.num_waiting,
            "num_running": lease.num_running,
            "carried_tokens": lease.carried_tokens,
            "tau_tokens": lease.tau_tokens,
            "model": lease.model,
            "quantization": lease.quantization,
            "kv_format": lease.kv_format,
            "protocol": lease.protocol,
            "version": lease.version,
        }

    def _misfit(self, misfit: Misfit) -> dict[str, Any]:
        """A worker that this router cannot use, and what differs."""
        lease, worker_id = misfit.lease, misfit.worker_id
        return {
            "worker_id": worker_id,
            "name": lease.name or worker_id if lease else worker_id,
            "node": lease.node if lease else "",
            "url": lease.url if lease else "",
            "role": lease.role.value if lease else None,
            "is_draining": lease.is_draining if lease else None,
            "model": lease.model if lease else None,
            "protocol": lease.protocol if lease else None,
            "version": lease.version if lease else "",
            "reason": misfit.reason,
            "differences": [asdict(each) for each in misfit.differences],
            "refused": self._refusal(worker_id),
        }

    def _refusal(self, worker_id: str) -> dict[str, Any] | None:
        """A wish for this worker that was not granted, with its reason."""
        refusal = self._refused.get(worker_id)
        if refusal is None:
            return None
        wish = DesiredState.from_fields(refusal)
        return {
            "role": wish.role,
            "is_drained": bool(wish.is_drained),
            "reason": refusal.get("reason", ""),
        }

    # -- Prometheus -------------------------------------------------------------------------

    def collect(self) -> list[Metric]:
        """Gauges as of the last look (a ``prometheus_client`` collector)."""
        snapshot = self._fleet.snapshot
        if snapshot is None:
            return []
        return [
            *_worker_gauges(snapshot, self._leases, self._refused),
            *_line_gauges(snapshot),
        ]


def _worker_gauges(
    snapshot: FleetSnapshot,
    leases: Mapping[str, WorkerLease],
    refused: Mapping[str, Mapping[str, str]],
) -> list[GaugeMetricFamily]:
    def family(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            f"sangam_fleet_{name}", text, labels=["worker", "worker_id", "role"]
        )

    outstanding = family("outstanding_prefill_tokens", "o_w of Algorithm 2")
    deficit = family("deficit_tokens", "Budget S carried on by Algorithm 1, at the last heartbeat")
    free = family("free_pages", "KV pool less every reservation")
    total = family("total_pages", "KV pool")
    draining = family("is_draining", "1 while the worker takes no new work")
    wish = family("is_wish_refused", "1 while a wish for the worker's role or drain is refused")
    for worker in snapshot.fleet.workers:
        lease = leases.get(worker.worker_id)
        name = lease.name if lease is not None else ""
        labels = [name or worker.worker_id, worker.worker_id, worker.role.value]
        outstanding.add_metric(labels, worker.outstanding_prefill_tokens)
        free.add_metric(labels, worker.free_pages)
        total.add_metric(labels, worker.total_pages)
        draining.add_metric(labels, int(worker.is_draining))
        wish.add_metric(labels, int(worker.worker_id in refused))
        if lease is not None:
            deficit.add_metric(labels, lease.carried_tokens)
    return [outstanding, deficit, free, total, draining, wish]


def _line_gauges(snapshot: FleetSnapshot) -> list[GaugeMetricFamily]:
    line = GaugeMetricFamily(
        "sangam_waiting_line", "Requests in line, over all routers", labels=["line"]
    )
    line.add_metric([Line.PREFILL.value], snapshot.num_waiting)
    line.add_metric([Line.DECODE.value], snapshot.num_pending_decodes)
    pages = GaugeMetricFamily(
        "sangam_pending_decode_pages", "Pages that prefilled blocks wait for", labels=[]
    )
    pages.add_metric([], snapshot.fleet.pending_decode_pages)
    return [line, pages]
