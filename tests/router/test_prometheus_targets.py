"""How Prometheus finds the workers: their ports are free ones, which only the ledger knows."""

from pathlib import Path
from typing import Any

import httpx
from tests.router.leases import Fleet, until
from tests.router.stub_worker import StubWorker
from tests.router.test_ledger_places import router

from sangam_core.wire import PROTOCOL_VERSION
from sangam_router.internal_api import internal_app
from sangam_router.router import Parts

PATH = "/admin/prometheus-targets"


async def ask(parts: Parts, path: str) -> httpx.Response:
    app = internal_app(parts.public.metrics, parts.report, parts.readiness, parts.audit)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://r") as inside:
        return await inside.get(path)


async def targets(leased: Fleet, model_folder: Path) -> list[dict[str, Any]]:
    async with router(leased, model_folder) as (parts, _):
        await until(lambda: has_seen_the_fleet(parts))
        response = await ask(parts, PATH)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    return sorted(response.json(), key=lambda group: str(group["targets"]))


async def has_seen_the_fleet(parts: Parts) -> bool:
    return parts.readiness.problem() is None


async def test_every_worker_is_a_target_under_its_registered_address(
    leased: Fleet, model_folder: Path
) -> None:
    await leased.publish(StubWorker("uid-a"), url="http://10.0.0.7:21034", name="w-0", node="n1")
    await leased.publish(StubWorker("uid-b"), url="http://[fd00::7]:20001")
    first, second = await targets(leased, model_folder)
    assert first == {
        "targets": ["10.0.0.7:21034"],
        "labels": {
            "worker": "w-0",
            "node": "n1",
            "__meta_sangam_worker_id": "uid-a",
            "__meta_sangam_boot_role": "colocated",
        },
    }
    assert second["targets"] == ["[fd00::7]:20001"]
    assert second["labels"]["worker"] == "uid-b"


async def test_a_worker_of_another_version_is_scraped_too(
    leased: Fleet, model_folder: Path
) -> None:
    await leased.publish(
        StubWorker("new"), url="http://10.0.0.8:21034", protocol=PROTOCOL_VERSION + 1
    )
    assert [group["targets"] for group in await targets(leased, model_folder)] == [
        ["10.0.0.8:21034"]
    ]


async def test_what_was_seen_last_is_told_without_asking_redis(
    leased: Fleet, model_folder: Path
) -> None:
    await leased.publish(StubWorker("a"))
    async with router(leased, model_folder, fleet_refresh_seconds=3600) as (parts, _):
        await until(lambda: has_seen_the_fleet(parts))
        await leased.publish(StubWorker("b"))
        before = (await ask(parts, PATH)).json()
        assert (await ask(parts, "/admin/fleet")).status_code == 200  # this one asks
        after = (await ask(parts, PATH)).json()
    assert (len(before), len(after)) == (1, 2)


async def test_an_empty_fleet_is_an_empty_list(leased: Fleet, model_folder: Path) -> None:
    assert await targets(leased, model_folder) == []


async def test_without_a_look_into_redis_prometheus_keeps_its_targets(model_folder: Path) -> None:
    async with (
        Fleet("redis://127.0.0.1:1/0") as nowhere,
        router(nowhere, model_folder) as (parts, _),
    ):
        response = await ask(parts, PATH)
    assert response.status_code == 503
    assert response.json() == {"problem": "Redis has not answered yet"}


async def test_a_refused_wish_is_a_gauge(leased: Fleet, model_folder: Path) -> None:
    await leased.publish(StubWorker("a"), StubWorker("b"))
    await leased.redis.hset(leased.keys.refused("a"), mapping={"role": "prefill", "reason": "x"})
    async with router(leased, model_folder) as (parts, _):
        metrics = (await ask(parts, "/metrics")).text
    for worker, value in (("a", 1.0), ("b", 0.0)):
        labels = f'role="colocated",worker="{worker}",worker_id="{worker}"'
        assert f"sangam_fleet_is_wish_refused{{{labels}}} {value}" in metrics
