"""Puts a router together and runs it: the only place that knows all parts.

Reads the model's files, opens Redis and the workers' client, starts ledger, fleet view and both
servers, and takes them down in order.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from sangam_core.model_config import ModelTokens
from sangam_core.placements import counts_blocks
from sangam_router.driver import Driver, DriverLimits
from sangam_router.fleet import FleetView
from sangam_router.fleet_report import FleetReport
from sangam_router.fleet_watch import FleetWatcher, WatchStatus
from sangam_router.fleet_watch.start import fleet_watcher
from sangam_router.internal_api import Readiness, internal_app
from sangam_router.ledger import Ledger
from sangam_router.ledger.audit import Audit
from sangam_router.ledger.connect import connect
from sangam_router.ledger.placing import Placer
from sangam_router.ledger.scripts import Client
from sangam_router.ledger_places import LedgerPlaces
from sangam_router.metrics import RouterMetrics
from sangam_router.model_files import model_folder, read_model_tokens
from sangam_router.public_api.app import PublicParts, public_app
from sangam_router.public_api.wishes import ServiceLimits, Wishes
from sangam_router.serving import Listener, listen, stop, stop_on_signals
from sangam_router.settings import RouterSettings
from sangam_router.tokenizer import TextTokenizer
from sangam_router.worker_client import HttpWorkerClient

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Model:
    """What is served, as far as the router reads it."""

    tokens: ModelTokens
    tokenizer: TextTokenizer

    @classmethod
    def read(cls, settings: RouterSettings) -> "Model":
        """Read config and tokenizer. ``ConfigurationError`` names what is wrong."""
        folder = model_folder(settings.model)
        return cls(read_model_tokens(folder), TextTokenizer.read(folder))


async def serve(settings: RouterSettings, model: Model) -> None:
    """Serve until SIGTERM or SIGINT, then let what is in flight finish.

    Raises:
        ConfigurationError: a port or the Redis URL cannot be used.
    """
    stopping = stop_on_signals()
    public_socket, internal_socket = (
        listen(host, port, name, dead_peer_seconds=settings.send_seconds)
        for host, port, name in (
            (settings.public_host, settings.public_port, "SANGAM_PUBLIC_PORT"),
            (settings.internal_host, settings.internal_port, "SANGAM_INTERNAL_PORT"),
        )
    )
    async with running(settings, model) as parts:
        public = Listener(public_app(parts.public), public_socket)
        internal = Listener(
            internal_app(parts.public.metrics, parts.report, parts.readiness, parts.audit),
            internal_socket,
        )
        public_server = public.server(settings.shutdown_seconds, head_seconds=settings.head_seconds)
        internal_server = internal.server(1.0, head_seconds=settings.head_seconds)
        async with asyncio.TaskGroup() as group:
            serving_public = group.create_task(public_server.serve([public_socket]))
            serving_internal = group.create_task(internal_server.serve([internal_socket]))
            _log.info("serving", public=public.url, internal=internal.url, model=settings.model)
            waiting = group.create_task(stopping.wait())
            await asyncio.wait(
                {waiting, serving_public, serving_internal}, return_when=asyncio.FIRST_COMPLETED
            )
            waiting.cancel()
            parts.readiness.is_shutting_down = True
            _log.info("stopping", shutdown_seconds=settings.shutdown_seconds)
            await stop(public_server, serving_public)
            await stop(internal_server, serving_internal)
    _log.info("stopped")


@dataclass(frozen=True, slots=True)
class Parts:
    """A running router without its ports."""

    public: PublicParts
    report: FleetReport
    readiness: Readiness
    audit: Callable[[], Awaitable[Audit]]


@asynccontextmanager
async def running(settings: RouterSettings, model: Model) -> AsyncIterator[Parts]:
    """Everything behind the ports, for the length of a block."""
    metrics = RouterMetrics()
    redis = connect(
        settings.redis_url.get_secret_value(),
        password=settings.redis_password,
        cluster=settings.redis_cluster,
        timeout_seconds=settings.redis_timeout_seconds,
    )
    ledger = _ledger(settings, redis)
    fleet = FleetView(
        ledger, policy=settings.policy, worker_lease_seconds=settings.worker_lease_seconds
    )
    client = _worker_client(settings)
    driver = _driver(settings, model, ledger, fleet, client, metrics)
    try:
        async with (
            client,
            fleet_watcher(settings, redis, metrics) as watcher,
            asyncio.TaskGroup() as group,
        ):
            jobs = [ledger.run(), fleet.run(settings.fleet_refresh_seconds)]
            if watcher is not None:
                jobs.append(watcher.run())
            background = [group.create_task(job) for job in jobs]
            try:
                yield Parts(
                    public=PublicParts(
                        settings=settings,
                        tokenizer=model.tokenizer,
                        wishes=Wishes(model.tokens, _service_limits(settings), fleet),
                        driver=driver,
                        metrics=metrics,
                    ),
                    report=_report(settings, redis, ledger, fleet, watcher),
                    readiness=Readiness(fleet, redis_grace_seconds=settings.redis_grace_seconds),
                    audit=ledger.audit,
                )
            finally:
                for task in background:
                    task.cancel()
    finally:
        await ledger.aclose()
        await redis.aclose()


def _ledger(settings: RouterSettings, redis: Client) -> Ledger:
    return Ledger(
        redis,
        namespace=settings.redis_namespace,
        router_id=settings.router_id,
        model=settings.model,
        block_length=settings.block_length,
        counts_blocks=counts_blocks(settings.policy),
        lease_seconds=settings.router_lease_seconds,
        poll_seconds=settings.poll_seconds,
    )


def _worker_client(settings: RouterSettings) -> HttpWorkerClient:
    return HttpWorkerClient(
        token=settings.internal_token.get_secret_value(),
        connect_seconds=settings.connect_seconds,
        answer_seconds=settings.answer_seconds,
        silence_seconds=settings.silence_seconds,
    )


def _report(
    settings: RouterSettings,
    redis: Client,
    ledger: Ledger,
    fleet: FleetView,
    watcher: FleetWatcher | None,
) -> FleetReport:
    return FleetReport(
        redis,
        ledger,
        fleet,
        timeout_seconds=2 * settings.redis_timeout_seconds,
        watch_status=lambda: watcher.status if watcher is not None else WatchStatus(),
    )


def _driver(
    settings: RouterSettings,
    model: Model,
    ledger: Ledger,
    fleet: FleetView,
    client: HttpWorkerClient,
    metrics: RouterMetrics,
) -> Driver:
    placer = Placer(ledger, fleet, settings.policy, patience_seconds=settings.no_worker_seconds)
    places = LedgerPlaces(
        ledger,
        placer,
        fleet,
        max_waiting=settings.max_waiting,
        stall_seconds=settings.stall_seconds,
    )
    return Driver(
        places=places,
        workers=client,
        mask_id=model.tokens.mask_id,
        decode=model.tokenizer.decode,
        limits=_driver_limits(settings),
        metrics=metrics,
    )


def _driver_limits(settings: RouterSettings) -> DriverLimits:
    return DriverLimits(
        request_seconds=settings.request_seconds,
        max_lost=settings.max_lost,
        backoff_seconds=settings.backoff_seconds,
        max_backoff_seconds=settings.max_backoff_seconds,
        settle_seconds=settings.settle_seconds,
    )


def _service_limits(settings: RouterSettings) -> ServiceLimits:
    return ServiceLimits(
        default_max_tokens=settings.default_max_tokens,
        block_length=settings.block_length,
        max_fan_out=settings.max_fan_out,
        fixed_mask_buffer_tokens=settings.fixed_mask_buffer_tokens,
    )
