"""What operators are told of the ledger's counters: whether they are the sums of its records."""

from pathlib import Path
from typing import Any

from tests.router.leases import Fleet
from tests.router.stub_worker import StubWorker
from tests.router.test_ledger_places import router
from tests.router.test_prometheus_targets import ask

from sangam_core.errors import Unavailable
from sangam_router.ledger.audit import Audit
from sangam_router.router import Parts

PATH = "/admin/audit"


async def audited(parts: Parts) -> dict[str, Any]:
    response = await ask(parts, PATH)
    assert response.status_code == 200
    told: dict[str, Any] = response.json()
    return told


async def test_counters_that_are_not_what_records_say_are_told(
    leased: Fleet, model_folder: Path
) -> None:
    await leased.publish(StubWorker("w"))
    async with router(leased, model_folder) as (parts, _):
        assert await audited(parts) == {
            "is_consistent": True,
            "differences": [],
            "num_records": 0,
            "num_waiting": 0,
        }
        await leased.redis.hset(f"{leased.keys.prefix}load", "w\x1fe", "7")
        told = await audited(parts)
    assert not told["is_consistent"]
    assert told["differences"] == [
        {"counter": "load", "field": ["w", "e"], "counted": 7, "recorded": 0}
    ]


async def test_a_redis_that_is_away_is_said(leased: Fleet, model_folder: Path) -> None:
    async def unavailable() -> Audit:
        raise Unavailable("Redis cannot be used now")

    async with router(leased, model_folder) as (parts, _):
        broken = Parts(parts.public, parts.report, parts.readiness, unavailable)
        response = await ask(broken, PATH)
    assert (response.status_code, response.json()) == (503, {"problem": "Redis cannot be used now"})
