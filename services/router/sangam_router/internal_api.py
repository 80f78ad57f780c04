"""The internal port: ``/metrics``, ``/readyz``, ``/admin/*`` and the fleet page.

For operators, probes and Prometheus; never published. Decides when the router is ready.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib import resources

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sangam_core.errors import Unavailable
from sangam_router.fleet import FleetView
from sangam_router.fleet_report import FleetReport
from sangam_router.ledger.audit import Audit
from sangam_router.metrics import RouterMetrics


class Readiness:
    """Whether load balancers should send requests here.

    A router is ready once it has seen Redis, and for ``redis_grace_seconds`` without it: requests
    then wait, which beats every router leaving its load balancer because Redis restarts. Workers
    do not matter: without any, this router is the one to say so (503).

    Args:
        clock: monotonic seconds, the ledger's.
    """

    def __init__(
        self,
        fleet: FleetView,
        *,
        redis_grace_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._redis_grace_seconds = redis_grace_seconds
        self._clock = clock
        self.is_shutting_down = False

    def problem(self) -> str | None:
        """Why the router is not ready, ``None`` when it is."""
        if self.is_shutting_down:
            return "shutting down"
        snapshot = self._fleet.snapshot
        if snapshot is None:
            return "Redis has not answered yet"
        silent_seconds = self._clock() - snapshot.taken_at_seconds
        if silent_seconds > self._redis_grace_seconds:
            return f"Redis has not answered for {silent_seconds:.0f} s"
        return None

    def fleet_problem(self) -> str | None:
        """Why no worker could serve now, ``None`` when some can."""
        return self._fleet.problem()


def internal_app(
    metrics: RouterMetrics,
    report: FleetReport,
    readiness: Readiness,
    audit: Callable[[], Awaitable[Audit]],
) -> FastAPI:
    """The internal ASGI application.

    Args:
        audit: reads all of the ledger (``Ledger.audit``); only when it is asked for.
    """
    app = FastAPI(title="Sangam router", docs_url=None, redoc_url=None, openapi_url=None)
    page = resources.files(__package__).joinpath("fleet_page.html").read_text("utf-8")
    metrics.registry.register(report)

    async def show_metrics() -> Response:
        await report.refresh()
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def ready() -> Response:
        problem = readiness.problem()
        # What keeps the fleet from serving is told too; every router sees the same fleet, so it is
        # no reason to send requests to another.
        body = {
            "is_ready": problem is None,
            "problem": problem,
            "fleet_problem": readiness.fleet_problem(),
        }
        return JSONResponse(body, 503 if problem else 200)

    async def alive() -> Response:
        return JSONResponse({"status": "ok"})

    async def show_fleet() -> Response:
        await report.refresh()
        return JSONResponse(report.body())

    async def show_prometheus_targets() -> Response:
        # As of the fleet view's last look, a second ago: leases say all, Redis need not be asked.
        targets = report.prometheus_targets()
        if targets is None:
            return JSONResponse({"problem": "Redis has not answered yet"}, 503)
        return JSONResponse(targets)

    async def show_audit() -> Response:
        try:
            found = await audit()
        except Unavailable as error:
            return JSONResponse({"problem": str(error)}, 503)
        return JSONResponse(_audit_body(found))

    async def show_page() -> Response:
        return HTMLResponse(page)

    app.add_api_route("/metrics", show_metrics, response_model=None)
    app.add_api_route("/readyz", ready, response_model=None)
    app.add_api_route("/healthz", alive, response_model=None)
    app.add_api_route("/admin/fleet", show_fleet, response_model=None)
    app.add_api_route("/admin/prometheus-targets", show_prometheus_targets, response_model=None)
    app.add_api_route("/admin/audit", show_audit, response_model=None)
    app.add_api_route("/", show_page, response_model=None)
    return app


def _audit_body(audit: Audit) -> dict[str, object]:
    """Every script of the ledger leaves counters and records alike: a difference is a fault."""
    return {
        "is_consistent": not audit.differences,
        "differences": [asdict(each) for each in audit.differences],
        "num_records": len(audit.records),
        "num_waiting": len(audit.entries),
    }
