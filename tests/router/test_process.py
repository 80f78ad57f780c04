"""``python -m sangam_router`` as a process: ports, readiness without Redis, a graceful end."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.router.builders import MODEL
from tests.router.leases import Fleet, until
from tests.router.stub_worker import TOKEN, StubWorker, say
from tests.router.test_api_answers import TEXT, messages

from sangam_core.wire import BlockStart
from sangam_router.local.ports import free_ports
from sangam_router.local.redis_server import running_redis

pytestmark = pytest.mark.integration


class RouterProcess:
    """A running router."""

    def __init__(self, process: asyncio.subprocess.Process, public: int, internal: int) -> None:
        self.process = process
        self.public = httpx.AsyncClient(base_url=f"http://127.0.0.1:{public}", timeout=30)
        self.internal = httpx.AsyncClient(base_url=f"http://127.0.0.1:{internal}", timeout=30)

    async def status(self, path: str = "/readyz") -> int:
        """Of the internal port; 0 while it is not there."""
        try:
            return (await self.internal.get(path)).status_code
        except httpx.TransportError:
            return 0

    async def is_ready(self) -> bool:
        return await self.status() == 200

    async def ask(self) -> httpx.Response:
        body = {"model": MODEL, "messages": messages()}
        return await self.public.post("/v1/chat/completions", json=body)


def environment(model_folder: Path, **changes: Any) -> dict[str, str]:
    settings = {"INTERNAL_TOKEN": TOKEN, "MODEL": model_folder, "LOG_FORMAT": "console"} | changes
    ours = {f"SANGAM_{name}": str(value) for name, value in settings.items()}
    return {**{k: v for k, v in os.environ.items() if not k.startswith("SANGAM_")}, **ours}


@asynccontextmanager
async def router_process(
    model_folder: Path, leased: Fleet, **changes: Any
) -> AsyncIterator[RouterProcess]:
    """A router process that is up; killed at the end if it still runs."""
    public, internal = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sangam_router",
        env=environment(
            model_folder,
            PUBLIC_HOST="127.0.0.1",
            INTERNAL_HOST="127.0.0.1",
            PUBLIC_PORT=public,
            INTERNAL_PORT=internal,
            REDIS_URL=leased.url,
            REDIS_NAMESPACE=leased.namespace,
            **changes,
        ),
    )
    router = RouterProcess(process, public, internal)
    try:
        await until(lambda: is_up(router), 60)
        yield router
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await router.public.aclose()
        await router.internal.aclose()


async def is_up(router: RouterProcess) -> bool:
    assert router.process.returncode is None, "the router has ended"
    return await router.status("/healthz") == 200


@pytest.fixture
def leased_model(model_folder: Path, leased: Fleet) -> Fleet:
    leased.model = str(model_folder)
    return leased


async def test_it_serves_and_lets_requests_finish_before_it_ends(
    model_folder: Path, leased_model: Fleet
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(start: BlockStart, step: int) -> None:
        if start.key.block == 1:
            reached.set()
            await go_on.wait()

    async with (
        StubWorker(answer=say(TEXT), before_pass=hold) as worker,
        router_process(model_folder, leased_model) as router,
    ):
        await leased_model.publish(worker)
        await until(router.is_ready)
        asking = asyncio.create_task(router.ask())
        await asyncio.wait_for(reached.wait(), 20)
        router.process.send_signal(signal.SIGTERM)
        await until(lambda: refuses_connections(router))
        assert await router.status() == 503, "the internal port says that it is leaving"
        go_on.set()
        answer = await asking
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        assert await asyncio.wait_for(router.process.wait(), 20) == 0
        assert await leased_model.is_empty()


async def refuses_connections(router: RouterProcess) -> bool:
    try:
        async with httpx.AsyncClient() as fresh:
            await fresh.get(f"{router.public.base_url}/healthz")
    except httpx.TransportError:
        return True
    return False


async def test_requests_that_do_not_finish_in_time_are_cut_and_free_everything(
    model_folder: Path, leased_model: Fleet
) -> None:
    reached = asyncio.Event()

    async def hang(start: BlockStart, step: int) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with (
        StubWorker(before_pass=hang) as worker,
        router_process(model_folder, leased_model, SHUTDOWN_SECONDS=1) as router,
    ):
        await leased_model.publish(worker)
        await until(router.is_ready)
        asking = asyncio.create_task(router.ask())
        await asyncio.wait_for(reached.wait(), 20)
        router.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(router.process.wait(), 20) == 0
        answer = await asking
        assert answer.status_code == 503, answer.text
        assert "router stops" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        await worker.until_idle()
        assert await leased_model.is_empty()


async def test_a_redis_restart_takes_no_router_out_and_loses_no_request(
    model_folder: Path,
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(start: BlockStart, step: int) -> None:
        if (start.key.block, step) == (1, 1):
            reached.set()
            await go_on.wait()

    with running_redis() as redis:
        async with (
            StubWorker(answer=say(TEXT), before_pass=hold) as worker,
            Fleet(redis.url, str(model_folder)) as leased,
            router_process(model_folder, leased, WORKER_LEASE_SECONDS=60) as router,
        ):
            await leased.publish(worker)
            await until(router.is_ready)
            asking = asyncio.create_task(router.ask())
            await asyncio.wait_for(reached.wait(), 20)
            redis.kill()
            go_on.set()
            waiting = asyncio.create_task(router.ask())
            await worker.until_idle()
            assert await router.status() == 200, "it is ready without Redis"
            redis.start()
            await leased.redis.connection_pool.disconnect()
            await leased.publish(worker)
            for response in (await asking, await waiting):
                assert response.json()["choices"][0]["message"]["content"] == TEXT
            await until(leased.is_empty)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"INTERNAL_TOKEN": ""}, "SANGAM_INTERNAL_TOKEN"),
        ({"PUBLIC_PORT": "http"}, "SANGAM_PUBLIC_PORT"),
        ({"THETA_TOKENS": "-1"}, "SANGAM_THETA_TOKENS"),
        ({"FIXED_MASK_BUFFER_TOKENS": "50"}, "SANGAM_FIXED_MASK_BUFFER_TOKENS"),
        ({"MODEL": "./no-such-model"}, "./no-such-model"),
        ({"REDIS_URL": "http://x"}, "redis"),
        ({"PUBLIC_HOST": "203.0.113.1"}, "SANGAM_PUBLIC_PORT"),
    ],
)
async def test_what_cannot_be_used_ends_it_with_one_line(
    model_folder: Path, settings: dict[str, str], named: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sangam_router",
        env=environment(model_folder, **settings),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert errors.count(b"\n") == 1
    assert named in errors.decode()


async def test_variables_that_do_nothing_are_told_at_the_start(model_folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sangam_router",
        env=environment(
            model_folder,
            MODEL="./no-such-model",
            LOG_FORMAT="json",
            THETA_TOKEN="512",
            TAU_TOKENS_PREFILL="512",
            API_KEY="key-of-a-client",
        ),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    first, second, last = errors.decode().splitlines()
    mistyped, misplaced = json.loads(first), json.loads(second)
    assert (mistyped["level"], mistyped["event"]) == ("warning", "unknown_setting")
    assert mistyped["variable"] == "SANGAM_THETA_TOKEN"
    assert mistyped["problem"].endswith("did you mean SANGAM_THETA_TOKENS?")
    assert "SANGAM_API_KEYS" in misplaced["problem"]
    assert "key-of-a-client" not in errors.decode()
    assert last.startswith("sangam-router: ")
