"""The probes and the preStop hook, as Kubernetes runs them, against a worker that serves."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.worker.fakes import GatedTransport, ToyEngine
from tests.worker.harness import TOKEN, BlockRun, a_client, a_start, a_worker, eventually
from tests.worker.ledger_watch import QUICK
from tests.worker.loopback import LoopbackHub, LoopbackTransport

from sangam_core.wire import TOKEN_HEADER, Lost
from sangam_router.local.redis_server import RedisServer, running_redis
from sangam_worker import probe


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


def environment(port_file: Path, worker_id: str = "w", **more: str) -> dict[str, str]:
    return {
        "SANGAM_PORT_FILE": str(port_file),
        "SANGAM_WORKER_ID": worker_id,
        "SANGAM_INTERNAL_TOKEN": TOKEN,
        **more,
    }


async def outcome(kind: str, env: dict[str, str]) -> str:
    """What a probe says; its complaint when it fails."""
    try:
        return await asyncio.to_thread(probe.check, kind, env)
    except probe.NotWell as trouble:
        return f"not well: {trouble}"


async def test_a_worker_that_serves_passes_every_probe(server: RedisServer, tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    settings = {"redis_url": server.url, "worker_id": "w", "port_file": port_file, **QUICK}
    async with a_worker(**settings):
        env = environment(port_file)
        assert await outcome("startup", env) == "ok"
        assert await outcome("live", env) == "ok"

        async def is_ready() -> bool:
            return await outcome("ready", env) == "ready"

        await eventually(is_ready)


async def test_readiness_needs_the_lease_and_the_transport(
    server: RedisServer, tmp_path: Path
) -> None:
    port_file, hub = tmp_path / "port", LoopbackHub()
    transports: list[GatedTransport] = []

    def make_transport(pool: object) -> GatedTransport:
        transports.append(GatedTransport(LoopbackTransport(pool, hub)))  # type: ignore[arg-type]
        return transports[-1]

    settings = {"redis_url": server.url, "worker_id": "w", "port_file": port_file, **QUICK}
    async with a_worker(make_transport=make_transport, **settings) as worker:
        env = environment(port_file)

        async def is_ready() -> bool:
            return await outcome("ready", env) == "ready"

        await eventually(is_ready)
        transports[0].complaint = "no way to any peer"
        assert "no way to any peer" in await outcome("ready", env)
        assert await outcome("live", env) == "ok"
        transports[0].complaint = None
        await worker.presence.withdraw()
        assert "no lease in Redis" in await outcome("ready", env)


async def test_before_the_port_is_known_a_probe_says_that_weights_are_loading(
    tmp_path: Path,
) -> None:
    assert "the worker is starting" in await outcome("startup", environment(tmp_path / "port"))


async def test_a_neighbour_at_the_port_of_a_dead_process_does_not_pass(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    async with a_worker(worker_id="neighbour", port_file=port_file):
        for kind in ("startup", "live"):
            assert "another worker" in await outcome(kind, environment(port_file))


async def test_draining_waits_for_the_running_block_and_hands_back_the_waiting_one(
    tmp_path: Path,
) -> None:
    engine, port_file = ToyEngine(), tmp_path / "port"
    async with a_worker(engine, worker_id="w", port_file=port_file) as worker, a_client() as client:
        engine.gate.clear()
        running = await client.start(worker, a_start(worker, "running"))
        await eventually(lambda: engine.num_iterations > 0)
        waiting = await client.start(worker, a_start(worker, "waiting"))
        draining = asyncio.create_task(asyncio.to_thread(probe.drain, environment(port_file)))
        await eventually(lambda: worker.standing.is_draining)
        assert not draining.done()
        engine.gate.set()
        event = await waiting.until(Lost)
        assert isinstance(event, Lost)
        assert event.reason.code == "draining"
        assert (await running.rest())[-1] == "completed"
        assert await asyncio.wait_for(draining, 10) == "drained"


async def test_draining_ends_at_its_deadline(tmp_path: Path) -> None:
    engine, port_file = ToyEngine(), tmp_path / "port"
    async with a_worker(engine, worker_id="w", port_file=port_file) as worker, a_client() as client:
        engine.gate.clear()
        run: BlockRun = await client.start(worker, a_start(worker, "stuck"))
        env = environment(port_file, SANGAM_DRAIN_DEADLINE_SECONDS="0.4")
        assert await asyncio.to_thread(probe.drain, env) == "1 block is left after 0.4 s"
        engine.gate.set()
        await run.rest()


async def test_draining_without_the_token_or_without_a_worker_gives_up_at_once(
    tmp_path: Path,
) -> None:
    port_file = tmp_path / "port"
    assert "not drained" in await asyncio.to_thread(probe.drain, environment(port_file))
    async with a_worker(worker_id="w", port_file=port_file) as worker:
        env = environment(port_file, SANGAM_INTERNAL_TOKEN="wrong")
        assert "not drained" in await asyncio.to_thread(probe.drain, env)
        assert not worker.standing.is_draining


@pytest.mark.parametrize("answer", [b"", b"not json", b"[]"])
def test_an_answer_without_sense_fails_the_probe(answer: bytes, tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        port_file = tmp_path / "port"
        port_file.write_text(str(http.server_address[1]))
        with pytest.raises(probe.NotWell):
            probe.check("live", environment(port_file))
        http.shutdown()


def test_the_command_needs_no_torch_and_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    check = "import sys; import sangam_worker.probe; print({'torch', 'pydantic'} & {*sys.modules})"
    seen = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert seen.stdout == "set()\n"
    command = [sys.executable, "-m", "sangam_worker.probe", "live"]
    env = environment(tmp_path / "port")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == "no port yet: the worker is starting (weights, kernels, graphs; see its log)\n"
    )
    assert subprocess.run([*command, "x"], capture_output=True, check=False).returncode == 2


def test_the_header_is_the_one_of_the_wire() -> None:
    assert probe.TOKEN_HEADER == TOKEN_HEADER
