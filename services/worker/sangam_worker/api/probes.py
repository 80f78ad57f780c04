"""Probes and metrics, open to everyone who reaches the port."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from sangam_worker.metrics import WorkerMetrics


@dataclass(frozen=True)
class Probes:
    """How to find out about health and readiness.

    Attributes:
        worker_id: who answers; with the host network a probe may reach a neighbour.
        ailment: what is wrong with the process, ``None`` when nothing is.
        reasons_not_ready: why it should get no new work; empty when ready.
        remarks: things an operator should know that change neither (refused desired roles).
    """

    worker_id: str
    ailment: Callable[[], str | None]
    reasons_not_ready: Callable[[], Sequence[str]]
    remarks: Callable[[], Sequence[str]]


def probe_routes(probes: Probes, metrics: WorkerMetrics) -> APIRouter:
    """``/healthz``, ``/readyz`` and ``/metrics``."""
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> JSONResponse:
        ailment = probes.ailment()
        body = {"worker_id": probes.worker_id, "status": "sick" if ailment else "ok"}
        if ailment is None:
            return JSONResponse(body)
        return JSONResponse({**body, "reason": ailment}, 503)

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        reasons = list(probes.reasons_not_ready())
        body = {
            "worker_id": probes.worker_id,
            "status": "not ready" if reasons else "ready",
            "reasons": reasons,
            "remarks": list(probes.remarks()),
        }
        return JSONResponse(body, 503 if reasons else 200)

    @router.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router
