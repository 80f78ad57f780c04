"""Puts the internal API together: routes, guard, error mapping."""

from dataclasses import dataclass

from fastapi import FastAPI
from starlette.types import ASGIApp

from sangam_worker.api import errors
from sangam_worker.api.blocks import block_routes
from sangam_worker.api.control import control_routes
from sangam_worker.api.guard import Guard
from sangam_worker.api.probes import Probes, probe_routes
from sangam_worker.api.transfers import transfer_routes
from sangam_worker.drain import RoleControl
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.service import BlockService
from sangam_worker.transfer.exchange import KVExchange


@dataclass(frozen=True)
class ApiParts:
    """What the routes speak to."""

    service: BlockService
    exchange: KVExchange
    control: RoleControl
    probes: Probes
    metrics: WorkerMetrics


def create_app(
    parts: ApiParts, *, token: str, max_body_bytes: int, body_deadline_seconds: float
) -> ASGIApp:
    """The ASGI application of one worker."""
    app = FastAPI(title="Sangam worker", openapi_url=None)
    errors.install(app)
    app.include_router(block_routes(parts.service))
    app.include_router(transfer_routes(parts.exchange))
    app.include_router(control_routes(parts.control))
    app.include_router(probe_routes(parts.probes, parts.metrics))
    return Guard(
        app,
        token=token,
        max_body_bytes=max_body_bytes,
        body_deadline_seconds=body_deadline_seconds,
    )
