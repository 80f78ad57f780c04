"""The watcher against an API server over real HTTP, with a ledger in memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from kubernetes.aio import client
from structlog.testing import capture_logs
from tests.router.fleet_watch.fake_api_server import FakeApiServer, a_fake_api_server, a_pod

from sangam_core.errors import ConfigurationError, Unavailable
from sangam_router.fleet_watch import FleetWatcher
from sangam_router.fleet_watch.kubernetes_pods import KubernetesPods, cluster_configuration
from sangam_router.ledger.desires import Decision, Verdict, Wish
from sangam_router.metrics import RouterMetrics

DEADLINE_SECONDS = 15.0


@dataclass
class MemoryLedger:
    """Keeps wishes; refuses or is away on demand."""

    wishes: dict[str, Wish] = field(default_factory=dict)
    num_bugs: int = 0
    num_writes: int = 0
    is_away: bool = False
    refuses: str = ""
    is_unsure: bool = False

    async def write(self, wish: Wish) -> Decision:
        self.num_writes += 1
        if self.is_away:
            raise Unavailable("Redis does not answer")
        if self.num_bugs:
            self.num_bugs -= 1
            raise RuntimeError("a script that has a bug")
        if self.is_unsure:
            return Decision(Verdict.UNSURE)
        if wish.objection or self.refuses:
            return Decision(Verdict.REFUSED, wish.objection or self.refuses)
        known = self.wishes.get(wish.worker_id)
        self.wishes[wish.worker_id] = wish
        is_news = known is None or (known.role, known.is_drained) != (wish.role, wish.is_drained)
        return Decision(Verdict.APPLIED if is_news else Verdict.KEPT)

    def role(self, worker_id: str = "u1") -> str | None:
        wish = self.wishes.get(worker_id)
        return wish.role if wish else None


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


@dataclass
class Scene:
    watcher: FleetWatcher
    ledger: MemoryLedger
    metrics: RouterMetrics

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def synced(self) -> None:
        await until(lambda: self.watcher.status.is_synced, "synced")


@asynccontextmanager
async def a_scene(server: FakeApiServer, resync_seconds: float = 600.0) -> AsyncIterator[Scene]:
    """A watcher that runs."""
    configuration = client.Configuration(host=server.url)
    pods = KubernetesPods(configuration, namespace="ns", selector="app=sangam")
    ledger, metrics = MemoryLedger(), RouterMetrics()
    watcher = FleetWatcher(pods, ledger, metrics.fleet_watch, resync_seconds=resync_seconds)
    task = asyncio.create_task(watcher.run())
    try:
        yield Scene(watcher, ledger, metrics)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await pods.aclose()
    assert task.cancelled(), task.exception()


async def test_pods_are_listed_and_followed_and_removing_the_annotation_returns() -> None:
    async with a_fake_api_server() as server:
        await server.put(a_pod(annotations={"sangam.io/role": "decode"}))
        async with a_scene(server) as scene:
            await until(lambda: scene.ledger.role() == "decode", "listed")
            await scene.synced()
            await server.put(a_pod(annotations={"sangam.io/role": "colocated"}))
            await until(lambda: scene.ledger.role() == "colocated", "followed")
            await server.put(a_pod())
            await until(lambda: scene.ledger.role() == "prefill", "returned to the boot role")
            await server.put(a_pod("u2", boot_role="decode"))
            await until(lambda: scene.ledger.role("u2") == "decode", "a new pod")
            assert server.num_lists == 1
            status = scene.watcher.status
            assert (status.is_enabled, status.problem) == (True, None)
            assert status.last_event_seconds_ago is not None
            assert scene.counted("sangam_fleet_watch_synced") == 1
    assert {query["labelSelector"] for query in server.queries} == {"app=sangam"}


async def test_a_recreated_pod_is_another_worker_that_starts_in_its_boot_role() -> None:
    async with a_fake_api_server() as server:
        await server.put(a_pod("old", name="p-0", annotations={"sangam.io/role": "decode"}))
        async with a_scene(server, resync_seconds=0.1) as scene:
            await until(lambda: scene.ledger.role("old") == "decode", "listed")
            await server.remove("old")
            await server.put(a_pod("new", name="p-0"))
            await until(lambda: scene.ledger.role("new") == "prefill", "the successor")
            scene.ledger.wishes.clear()
            await until(lambda: "new" in scene.ledger.wishes, "a resync")
            assert "old" not in scene.ledger.wishes


async def test_a_ledger_that_lost_its_data_gets_every_wish_again() -> None:
    async with a_fake_api_server() as server:
        await server.put(a_pod(annotations={"sangam.io/role": "decode"}))
        async with a_scene(server, resync_seconds=0.05) as scene:
            await scene.synced()
            scene.ledger.wishes.clear()
            await until(lambda: scene.ledger.role() == "decode", "written again")


async def test_a_redis_that_is_away_is_said_and_caught_up_with() -> None:
    async with a_fake_api_server() as server, a_scene(server, resync_seconds=0.05) as scene:
        await scene.synced()
        scene.ledger.is_away = True
        await server.put(a_pod(annotations={"sangam.io/role": "decode"}))
        await until(lambda: scene.watcher.status.problem is not None, "said")
        assert "Redis" in str(scene.watcher.status.problem)
        scene.ledger.is_away = False
        await until(lambda: scene.ledger.role() == "decode", "caught up")
        await until(lambda: scene.watcher.status.problem is None, "well again")


async def test_a_bug_does_not_end_the_watcher_and_is_said() -> None:
    async with a_fake_api_server() as server:
        with capture_logs() as logs:
            async with a_scene(server, resync_seconds=0.05) as scene:
                await scene.synced()
                scene.ledger.num_bugs = 2
                await server.put(a_pod(annotations={"sangam.io/role": "decode"}))
                await until(lambda: scene.ledger.role() == "decode", "went on")
                await scene.synced()
    assert [entry["log_level"] for entry in logs if "bug" in entry["event"]] == ["error"] * 2


async def test_a_history_that_is_gone_leads_to_a_new_list() -> None:
    async with a_fake_api_server() as server, a_scene(server) as scene:
        await scene.synced()
        await server.cut()  # and while nobody watches:
        server.oldest_version = 10_000
        await server.put(a_pod(annotations={"sangam.io/role": "decode"}))
        await until(lambda: server.num_lists >= 2, "listed again")
        server.oldest_version = 0
        await until(lambda: scene.ledger.role() == "decode", "caught up")
        await scene.synced()


async def test_an_api_server_that_goes_away_changes_nothing_and_is_found_again() -> None:
    async with a_fake_api_server() as server:
        await server.put(a_pod(annotations={"sangam.io/role": "decode"}))
        with capture_logs() as logs:
            async with a_scene(server, resync_seconds=0.05) as scene:
                await scene.synced()
                server.lists_fail_with = 503
                await server.cut()
                await until(lambda: not scene.watcher.status.is_synced, "noticed")
                await until(lambda: "503" in str(scene.watcher.status.problem), "said")
                assert scene.counted("sangam_fleet_watch_synced") == 0
                num_writes = scene.ledger.num_writes
                await until(lambda: scene.ledger.num_writes > num_writes, "wishes kept alive")
                await until(lambda: server.num_lists >= 3, "tried again")
                server.lists_fail_with = None
                await scene.synced()
                assert scene.ledger.role() == "decode"
    told = [entry for entry in logs if "cannot be followed" in entry["event"]]
    assert len(told) == 1


@pytest.mark.parametrize(
    "body", [[1], {"hello": 1}, {"metadata": {"resourceVersion": "1"}, "items": [{}]}]
)
async def test_an_answer_that_is_no_list_of_pods_is_said_and_survived(body: object) -> None:
    async with a_fake_api_server() as server:
        server.odd_list = body
        async with a_scene(server) as scene:
            await until(lambda: "no pod" in str(scene.watcher.status.problem), "said")
            server.odd_list = None
            await scene.synced()


async def test_an_event_without_a_pod_is_said_and_survived() -> None:
    async with a_fake_api_server() as server, a_scene(server) as scene:
        await scene.synced()
        await server.spoil()
        await until(lambda: scene.watcher.status.problem is not None, "said")
        await scene.synced()


async def test_watches_that_end_at_once_are_asked_for_ever_more_slowly() -> None:
    async with a_fake_api_server() as server:
        server.do_watches_end = True
        async with a_scene(server) as scene:
            began = time.monotonic()
            await until(lambda: server.num_watches >= 3, "asked again")
            # Pauses of 0.5 s and 1 s lie between three watches.
            assert time.monotonic() - began >= 1.4
            server.do_watches_end = False
            await server.put(a_pod(annotations={"sangam.io/role": "decode"}))
            await until(lambda: scene.ledger.role() == "decode", "followed all the same")


async def test_a_watch_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sangam_router.fleet_watch.kubernetes_pods._SILENCE_SECONDS", 0.3)
    async with a_fake_api_server() as server:
        server.is_silent = True
        async with a_scene(server) as scene:
            await scene.synced()
            await server.put(a_pod(annotations={"sangam.io/role": "decode"}))
            await until(lambda: "TimeoutError" in str(scene.watcher.status.problem), "given up")
            await until(lambda: scene.ledger.role() == "decode", "listed again")


async def test_a_refusal_is_logged_and_counted_once_and_tried_again() -> None:
    async with a_fake_api_server() as server:
        await server.put(a_pod(annotations={"sangam.io/role": "chef"}))
        with capture_logs() as logs:
            async with a_scene(server, resync_seconds=0.05) as scene:
                await until(lambda: scene.ledger.num_writes > 3, "tried again")
                name, label = "sangam_desired_role_refused_total", "unknown_role"
                assert scene.counted(name, reason=label) == 1
                scene.ledger.refuses = "last_decode_worker"
                await server.put(a_pod(annotations={"sangam.io/role": "prefill"}))
                await until(
                    lambda: scene.counted(name, reason="last_decode_worker") == 1, "another"
                )
                scene.ledger.refuses = ""
                await until(lambda: scene.ledger.role() == "prefill", "granted in the end")
    told = [entry for entry in logs if entry["event"] == "desired state refused"]
    assert [entry["reason"] for entry in told] == ["unknown_role", "last_decode_worker"]


async def test_what_was_said_of_a_pod_is_forgotten_with_it() -> None:
    name, refused = "sangam_desired_role_refused_total", {"sangam.io/role": "chef"}
    async with a_fake_api_server() as server, a_scene(server, resync_seconds=0.02) as scene:

        async def is_told(count: int) -> None:
            await until(
                lambda: scene.counted(name, reason="unknown_role") == count, f"told {count} times"
            )

        await server.put(a_pod("u1", annotations=refused))
        await is_told(1)
        await server.remove("u1")
        await server.put(a_pod("u2", name="p-2"))
        await until(lambda: "u2" in scene.ledger.wishes, "the removal is seen")
        await server.put(a_pod("u1", annotations=refused))
        await is_told(2)


async def test_a_decision_that_waits_for_leases_is_no_refusal() -> None:
    async with a_fake_api_server() as server:
        await server.put(a_pod(annotations={"sangam.io/role": "decode"}))
        with capture_logs() as logs:
            async with a_scene(server, resync_seconds=0.02) as scene:
                scene.ledger.is_unsure = True
                await until(lambda: scene.ledger.num_writes > 3, "asked again")
                scene.ledger.is_unsure = False
                await until(lambda: scene.ledger.role() == "decode", "granted in the end")
                assert not scene.counted("sangam_desired_role_refused_total", reason="")
                assert scene.watcher.status.problem is None
    assert "desired state refused" not in [entry["event"] for entry in logs]


async def test_without_any_way_to_an_api_server_the_start_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none")
    with pytest.raises(ConfigurationError, match="SANGAM_KUBERNETES_NAMESPACE"):
        await cluster_configuration()
