"""One worker, put together: engine, GPU thread, service, transfers, API, presence.

Decides the order of starting and leaving, nothing about blocks. ``__main__`` runs it as a
process; tests run several in one.
"""

import asyncio
import importlib.metadata
from collections.abc import Callable
from typing import Protocol

import structlog
from starlette.types import ASGIApp

from sangam_core.addresses import http_url
from sangam_core.geometry import PAGE_TOKENS
from sangam_core.lease import LedgerKeys, WorkerLease
from sangam_worker.api import ApiParts, create_app
from sangam_worker.api.probes import Probes
from sangam_worker.drain import RoleControl
from sangam_worker.loop import EngineLoop, Executes
from sangam_worker.metrics import WorkerMetrics
from sangam_worker.presence import Presence, connect
from sangam_worker.progress import SILENT
from sangam_worker.scheduler import Scheduler
from sangam_worker.server import HttpServer, bind, write_port_file
from sangam_worker.service import BlockService, ModelFacts
from sangam_worker.settings import WorkerSettings
from sangam_worker.sizing import largest_iteration
from sangam_worker.standing import Standing
from sangam_worker.transfer.exchange import KVExchange
from sangam_worker.transfer.peers import PeerClient
from sangam_worker.transfer.pool import KVGeometry, KVPool
from sangam_worker.transfer.protocol import KVTransport
from sangam_worker.warm_up import Runs, WarmUps, run_all

log = structlog.get_logger(__name__)

_THREAD_STOP_SECONDS = 5.0
_TRANSFER_STOP_SECONDS = 2.0


class Engine(Executes, Runs, Protocol):
    """What a worker needs of its engine."""

    @property
    def model_config(self) -> ModelFacts:
        """The model's facts."""
        ...

    @property
    def kv_pool(self) -> KVPool:
        """The pages."""
        ...


class Worker:
    """A worker's life: ``start``, then ``leave`` (drain) or ``stop`` (at once).

    Args:
        make_transport: builds the KV transport over the engine's pool.

    Raises:
        ConfigurationError: Redis' URL or the transport's address cannot be used.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        make_transport: Callable[[KVPool], KVTransport],
    ) -> None:
        self.settings = settings
        self.metrics = WorkerMetrics()
        self._engine = engine
        self._kv = KVGeometry.of(engine.kv_pool)
        self._transport = make_transport(engine.kv_pool)
        self._redis = connect(
            settings.redis_url.get_secret_value(),
            is_cluster=settings.redis_cluster,
            timeout_seconds=settings.redis_timeout_seconds,
            password=settings.redis_password,
        )
        self._pinger: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind, compute, serve, register.

        Raises:
            ConfigurationError: the port cannot be had, or the model does not work.
            EngineError: the device hangs.
        """
        settings = self.settings
        sock = bind(settings.host, settings.ports)
        port = sock.getsockname()[1]
        self.url = http_url(settings.reachable_host, port)
        self._put_together()
        try:
            await asyncio.to_thread(self.loop.start)
        except BaseException:
            sock.close()
            await self._peers.close()
            raise
        self._server = HttpServer(self._app(), sock, head_seconds=settings.head_deadline_seconds)
        await self._server.start()
        self._pinger = asyncio.create_task(
            self.service.ping_quiet_streams(settings.ping_seconds), name="pings"
        )
        self.presence.start()
        if settings.port_file is not None:
            write_port_file(settings.port_file, port)
        log.info(
            "worker serves",
            role=self.standing.role,
            model=settings.model,
            quantization=settings.quantization,
            total_pages=self._engine.kv_pool.total_pages,
            url=self.url,
            epoch=self.standing.epoch,
        )

    async def leave(self) -> None:
        """Drain, let running blocks finish within the deadline, withdraw the lease, stop."""
        log.info("worker drains", num_blocks=self.service.num_blocks)
        await self.control.leave()
        await self.presence.withdraw()
        await self.stop()

    async def stop(self) -> None:
        """End now; the lease is left to lapse."""
        if self._pinger is not None:
            self._pinger.cancel()
        await self.presence.close()
        await self.exchange.close(_TRANSFER_STOP_SECONDS)
        await self._server.stop()
        await self._peers.close()
        if not await asyncio.to_thread(self.loop.stop, _THREAD_STOP_SECONDS):
            log.warning("the GPU thread is left behind in an iteration")
        log.info("worker stopped")

    def _put_together(self) -> None:
        settings, engine, metrics = self.settings, self._engine, self.metrics
        pool = engine.kv_pool
        self.standing = Standing(
            worker_id=settings.worker_id,
            url=self.url,
            model=settings.model,
            role=settings.role,
            metrics=metrics,
        )
        self.service = BlockService(
            standing=self.standing,
            model=engine.model_config,
            total_pages=pool.total_pages,
            metrics=metrics,
        )
        self.scheduler = Scheduler(
            mask_id=engine.model_config.mask_id,
            total_pages=pool.total_pages,
            tau_tokens=settings.tau_tokens(settings.role),
            transferred_decode_share=settings.transferred_decode_share,
            admission=settings.admission,
            max_batch_blocks=settings.max_batch_blocks,
            max_batch_rows=largest_iteration(settings, engine.model_config).num_rows,
        )
        self.loop = EngineLoop(
            engine,
            self.scheduler,
            self.service.publish,
            metrics,
            max_engine_failures=settings.max_engine_failures,
            stall_seconds=settings.engine_stall_seconds,
            prepare=self._warm_up,
        )
        self._peers = PeerClient(settings.internal_token.get_secret_value(), self.url)
        self.exchange = self._exchange()
        metrics.transfers_hold(
            pairs=lambda: self.exchange.num_pairs,
            staging_bytes=lambda: self._transport.staging_bytes,
        )
        self.service.attach(self.loop, self.exchange)
        self.control = RoleControl(
            standing=self.standing,
            service=self.service,
            loop=self.loop,
            metrics=metrics,
            tau_tokens=settings.tau_tokens,
            close_pairs=self.exchange.close_pairs,
            drain_deadline_seconds=settings.drain_deadline_seconds,
        )
        self.presence = self._presence()
        self.standing.on_change(self.presence.nudge)

    def _exchange(self) -> KVExchange:
        return KVExchange(
            standing=self.standing,
            blocks=self.loop,
            transport=self._transport,
            geometry=self._kv,
            ask_sender=self._peers.ask_sender,
            tell_closed=self._peers.tell_closed,
            metrics=self.metrics,
            deadline_seconds=self.settings.transfer_deadline_seconds,
        )

    def _warm_up(self) -> None:
        """Run iterations of every kind on the GPU thread: ``start`` ran them on another one."""
        if self.settings.is_on_cuda:
            engine = self._engine
            warm_ups = WarmUps(
                engine.model_config, self.settings.block_length, engine.kv_pool.total_pages
            )
            run_all(engine, warm_ups.of_every_kind(), SILENT)

    def _presence(self) -> Presence:
        settings = self.settings
        return Presence(
            self._redis,
            LedgerKeys(settings.redis_namespace),
            lease=self._lease,
            is_fit=lambda: self.loop.ailment() is None,
            on_desired=self.control.desire,
            metrics=self.metrics,
            heartbeat_seconds=settings.heartbeat_seconds,
            lease_seconds=settings.lease_seconds,
            timeout_seconds=settings.redis_timeout_seconds,
        )

    def _app(self) -> ASGIApp:
        parts = ApiParts(
            service=self.service,
            exchange=self.exchange,
            control=self.control,
            probes=Probes(
                worker_id=self.standing.worker_id,
                ailment=self.loop.ailment,
                reasons_not_ready=self._reasons_not_ready,
                remarks=self.control.remarks,
            ),
            metrics=self.metrics,
        )
        return create_app(
            parts,
            token=self.settings.internal_token.get_secret_value(),
            max_body_bytes=self.settings.max_body_bytes,
            body_deadline_seconds=self.settings.body_deadline_seconds,
        )

    def _reasons_not_ready(self) -> list[str]:
        reasons = [
            self.loop.ailment(),
            self.presence.trouble,
            self._transport.ailment(),
            *self.standing.closures,
        ]
        return [str(reason) for reason in reasons if reason is not None]

    def _lease(self) -> WorkerLease:
        status, standing, settings = self.loop.status, self.standing, self.settings
        return WorkerLease(
            worker_id=standing.worker_id,
            epoch=standing.epoch,
            role=standing.role,
            boot_role=standing.boot_role,
            url=standing.url,
            model=standing.model,
            version=_version(),
            name=settings.worker_name or standing.worker_id,
            node=settings.node_name,
            quantization=settings.quantization,
            kv_format=f"{self._kv.dtype} by {self._transport.name}",
            is_draining=standing.is_draining,
            total_pages=self._engine.kv_pool.total_pages,
            free_pages=status.free_pages,
            page_tokens=PAGE_TOKENS,
            block_length=settings.block_length,
            max_sequence_tokens=self._engine.model_config.max_sequence_tokens,
            num_waiting=status.num_waiting,
            num_running=status.num_running,
            carried_tokens=status.carried_tokens,
            tau_tokens=settings.tau_tokens(standing.role),
        )


def _version() -> str:
    return importlib.metadata.version("sangam")
