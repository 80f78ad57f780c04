"""A whole cluster on this machine: Redis, routers and workers as child processes.

Decides which processes there are, their ports, and the settings each gets; keeping one alive is
``processes``'. Used by ``sangam up`` and by the integration tests, which kill parts of it.
"""

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sangam_core.errors import ConfigurationError
from sangam_core.placement import Role
from sangam_core.settings import ENV_PREFIX
from sangam_core.wire import TOKEN_HEADER
from sangam_router.local.ports import LOOPBACK, free_ports, require_free
from sangam_router.local.probes import HttpProbe, RedisProbe
from sangam_router.local.processes import ProcessEvent, ProcessSpec, SupervisedProcess, Watchdog
from sangam_router.local.redis_server import find_redis_server, server_arguments
from sangam_router.local.roles import DEFAULT_ROLES, RoleCounts
from sangam_router.model_files import SHIPPED_MODEL

START_SECONDS = 600.0
"""Time for everything to be ready; a large checkpoint may have to be downloaded first."""

_REDIS_SECONDS = 5.0
_ROUTER_SHUTDOWN_SECONDS = 5
"""Time for answers in flight when all of it is stopped; shorter than the grace before SIGKILL."""

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
"""Processes that share a machine's cores; one thread is also what "same bytes" is promised for."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What to start.

    Attributes:
        model: ``small``, a local folder, or a hub id.
        public_port: of the first router, further ones take the next; ``None``: free ports.
        internal_port: likewise, for metrics, readiness and the fleet page.
        redis_url: an existing Redis; ``None`` starts one that keeps nothing on disk.
        redis_server: the server to start; ``None`` finds one.
        namespace: prefix of the keys; a cluster on a shared Redis needs its own.
        tau_tokens: token budget of colocated and decode workers.
        prefill_tau_tokens: token budget of prefill workers.
        theta_tokens: load from which on a prefill worker is passed over.
        total_pages: KV pool of each worker. dtype: of weights and KV.
        worker_env, router_env: further settings as environment variables.
        env_by_worker: those of single workers, by their names (``worker-0`` and so on).

    An option left ``None`` keeps the service's own default.
    """

    log_dir: Path
    roles: RoleCounts = DEFAULT_ROLES
    num_routers: int = 1
    model: str = SHIPPED_MODEL
    public_port: int | None = None
    internal_port: int | None = None
    redis_url: str | None = None
    redis_server: Path | None = None
    namespace: str = "sangam"
    tau_tokens: int | None = None
    prefill_tau_tokens: int | None = None
    theta_tokens: float | None = None
    is_overflow_allowed: bool = True
    total_pages: int | None = None
    dtype: str | None = None
    start_seconds: float = START_SECONDS
    worker_env: Mapping[str, str] = field(default_factory=dict)
    router_env: Mapping[str, str] = field(default_factory=dict)
    env_by_worker: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def served_model_name(self) -> str:
        """The name that clients ask for."""
        if self.model == SHIPPED_MODEL:
            return "sangam-small"
        folder = Path(self.model).expanduser()
        return folder.resolve().name if folder.is_dir() else self.model


@dataclass(frozen=True, slots=True)
class Place:
    """A process and where it listens: for a router both ports, for a worker the internal one."""

    process: SupervisedProcess
    internal_url: str
    public_url: str = ""
    role: Role | None = None


class LocalCluster:
    """Starts everything, keeps it alive, stops it; an async context manager.

    Raises:
        ConfigurationError: from ``start``: a port is taken, or there is no Redis server.
        StartFailed: from ``start``: a process could not start; everything has been stopped.
    """

    def __init__(
        self, options: ClusterOptions, report: Callable[[ProcessEvent], None] = lambda event: None
    ) -> None:
        self.options = options
        self.token = secrets.token_urlsafe(24)
        self.redis: SupervisedProcess | None = None
        self.routers: list[Place] = []
        self.workers: list[Place] = []
        self.redis_url = options.redis_url or ""
        self._report = report
        self._watchdog = Watchdog()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def processes(self) -> list[SupervisedProcess]:
        """Everything that was started, Redis first."""
        places = [*self.routers, *self.workers]
        own_redis = [] if self.redis is None else [self.redis]
        return own_redis + [place.process for place in places]

    @property
    def public_urls(self) -> list[str]:
        """Bases of the routers' public ports."""
        return [place.public_url for place in self.routers]

    @property
    def http(self) -> aiohttp.ClientSession:
        """A session that carries the internal token; only while the cluster is up."""
        assert self._http is not None, "the cluster is not up"
        return self._http

    def overruled(self, environment: Mapping[str, str]) -> list[str]:
        """Variables that do nothing, as the processes were given other values; sorted."""
        given = {item for process in self.processes for item in process.spec.env.items()}
        return sorted(
            {
                name
                for name, value in given
                if name.startswith(ENV_PREFIX) and environment.get(name, value) != value
            }
        )

    async def start(self) -> None:
        """Start every process and wait until all are ready."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every process: routers first, so that clients hear of it, Redis last."""
        for group in (self.routers, self.workers):
            await asyncio.gather(*(place.process.stop() for place in group))
        if self.redis is not None:
            await self.redis.stop()
        await self._watchdog.stop()
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- internals ------------------------------------------------------------------------

    async def _start(self) -> None:
        deadline = time.monotonic() + self.options.start_seconds
        ports = self._choose_ports()
        self._http = aiohttp.ClientSession(headers={TOKEN_HEADER: self.token})
        await self._watchdog.start()
        if self.options.redis_url is None:
            self.redis = self._redis(ports.redis)
            self.redis.start()
            await self.redis.wait_ready(deadline - time.monotonic())
        else:
            await _require_redis(self.redis_url)
        for index, (public, internal) in enumerate(ports.routers):
            self.routers.append(self._router(index, public, internal))
        for index, (role, port) in enumerate(
            zip(self.options.roles.roles(), ports.workers, strict=True)
        ):
            self.workers.append(self._worker(index, role, port))
        starting = [place.process for place in (*self.routers, *self.workers)]
        for process in starting:
            process.start()
        await _all_ready(starting, deadline - time.monotonic())

    def _choose_ports(self) -> "_Ports":
        options = self.options
        count = options.num_routers
        num_workers = len(options.roles.roles())
        free = free_ports(2 * count + num_workers + 1)
        public, internal = free[:count], free[count : 2 * count]
        if options.public_port is not None:
            public = [require_free(options.public_port + index, "--port") for index in range(count)]
        if options.internal_port is not None:
            internal = [
                require_free(options.internal_port + index, "--internal-port")
                for index in range(count)
            ]
        return _Ports(list(zip(public, internal, strict=True)), free[2 * count : -1], free[-1])

    def _redis(self, port: int) -> SupervisedProcess:
        self.redis_url = f"redis://{LOOPBACK}:{port}/0"
        binary = self.options.redis_server or find_redis_server()
        argv = server_arguments(binary, port=port, folder=self.options.log_dir)
        return self._process("redis", tuple(argv), RedisProbe(LOOPBACK, port), {})

    def _router(self, index: int, public_port: int, internal_port: int) -> Place:
        name = f"router-{index}"
        internal_url = f"http://{LOOPBACK}:{internal_port}"
        env = {
            **self._common_env(),
            "SANGAM_ROUTER_ID": name,
            "SANGAM_SERVED_MODEL_NAME": self.options.served_model_name,
            "SANGAM_PUBLIC_HOST": LOOPBACK,
            "SANGAM_PUBLIC_PORT": str(public_port),
            "SANGAM_INTERNAL_HOST": LOOPBACK,
            "SANGAM_INTERNAL_PORT": str(internal_port),
            "SANGAM_OVERFLOW": str(self.options.is_overflow_allowed).lower(),
            "SANGAM_SHUTDOWN_SECONDS": str(_ROUTER_SHUTDOWN_SECONDS),
            **_given("SANGAM_THETA_TOKENS", self.options.theta_tokens),
            **self.options.router_env,
        }
        argv = (sys.executable, "-m", "sangam_router")
        probe = HttpProbe(self.http, f"{internal_url}/readyz")
        process = self._process(name, argv, probe, env)
        return Place(process, internal_url, f"http://{LOOPBACK}:{public_port}")

    def _worker(self, index: int, role: Role, port: int) -> Place:
        name = f"worker-{index}"
        url = f"http://{LOOPBACK}:{port}"
        env = {
            **self._common_env(),
            "SANGAM_WORKER_ID": name,
            "SANGAM_ROLE": role.value,
            "SANGAM_HOST": LOOPBACK,
            "SANGAM_PORT": str(port),
            **_given("SANGAM_TAU_TOKENS_COLOCATED", self.options.tau_tokens),
            **_given("SANGAM_TAU_TOKENS_DECODE", self.options.tau_tokens),
            **_given("SANGAM_TAU_TOKENS_PREFILL", self.options.prefill_tau_tokens),
            **_given("SANGAM_TOTAL_PAGES", self.options.total_pages),
            **_given("SANGAM_DTYPE", self.options.dtype),
            **self.options.worker_env,
            **self.options.env_by_worker.get(name, {}),
        }
        argv = (sys.executable, "-m", "sangam_worker")
        process = self._process(name, argv, HttpProbe(self.http, f"{url}/readyz"), env)
        return Place(process, url, role=role)

    def _common_env(self) -> dict[str, str]:
        return {
            **_ONE_THREAD,
            "SANGAM_MODEL": self.options.model,
            "SANGAM_REDIS_URL": self.redis_url,
            "SANGAM_REDIS_NAMESPACE": self.options.namespace,
            "SANGAM_INTERNAL_TOKEN": self.token,
            "SANGAM_LOG_FORMAT": "console",
        }

    def _process(
        self, name: str, argv: tuple[str, ...], probe: HttpProbe | RedisProbe, env: dict[str, str]
    ) -> SupervisedProcess:
        log_path = self.options.log_dir / f"{name}.log"
        self.options.log_dir.mkdir(parents=True, exist_ok=True)
        log_path.unlink(missing_ok=True)
        spec = ProcessSpec(name, argv, log_path, probe, env)
        return SupervisedProcess(spec, self._watchdog, self._report)


@dataclass(frozen=True, slots=True)
class _Ports:
    routers: list[tuple[int, int]]
    workers: list[int]
    redis: int


def _given(variable: str, value: object) -> dict[str, str]:
    return {} if value is None else {variable: str(value)}


async def _require_redis(url: str) -> None:
    """``ConfigurationError`` unless the Redis of ``--redis-url`` answers."""
    try:
        async with asyncio.timeout(_REDIS_SECONDS), Redis.from_url(url) as redis:
            await redis.ping()
    except (RedisError, OSError, TimeoutError, ValueError) as error:
        host = url.rpartition("@")[2]
        raise ConfigurationError(f"no Redis answers at {host} (--redis-url): {error}") from error


async def _all_ready(processes: list[SupervisedProcess], deadline_seconds: float) -> None:
    """Wait for all; the first that fails ends the wait with its ``StartFailed``."""
    waits = [asyncio.create_task(process.wait_ready(deadline_seconds)) for process in processes]
    try:
        await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
