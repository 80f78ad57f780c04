"""Scenario 5: upgrades that roll everything, rollbacks, an upgrade that cannot work; counts."""

import pytest
from tests.cluster.conftest import COUNTS
from tests.cluster.kube import CommandFailed, get, helm, kubectl, wait_until
from tests.cluster.load import Load
from tests.cluster.release import Release

ROLLS_ROUTERS = ("--set", "router.settings.logLevel=debug")
ROLLS_WORKERS = ("--set", "workers.defaults.settings.logLevel=debug")


def scale(release: Release, role: str, count: int) -> None:
    kubectl("scale", f"statefulset/{release.fullname}-{role}", f"--replicas={count}")


def revision(release: Release) -> int:
    """The number of the release's revision now."""
    lines = helm("history", release.name, "--max", "1").splitlines()
    return int(lines[-1].split()[0])


def test_an_upgrade_that_rolls_everything_keeps_what_a_scale_made(
    release: Release, load: Load
) -> None:
    scale(release, "colocated", 3)
    release.wait_for_workers(5)
    workers, routers = release.uids("worker"), release.uids("router")
    release.upgrade(*COUNTS, *ROLLS_ROUTERS, *ROLLS_WORKERS)
    assert release.sets() == {"prefill": 2, "decode": 0, "colocated": 3}
    release.wait_for_new_pods("worker", workers)
    release.wait_for_new_pods("router", routers)
    load.wait_for(10)


def test_a_rollback_restores_that_revision_s_counts_and_pods(release: Release, load: Load) -> None:
    workers = release.uids("worker")
    helm("rollback", release.name, str(revision(release) - 1), "--force-conflicts", "--wait")
    wait_until(lambda: release.sets()["colocated"] == 2, "two colocated workers wanted")
    release.wait_for_new_pods(
        "worker", {n: u for n, u in workers.items() if not n.endswith("colocated-2")}
    )
    release.wait_for_workers(4)
    load.wait_for(10)


def test_an_upgrade_that_can_never_become_ready_stops_and_the_old_version_serves(
    release: Release, load: Load
) -> None:
    broken = ("--set-string", "router.image.tag=none,workers.defaults.image.tag=none")
    with pytest.raises(CommandFailed):
        release.upgrade(*COUNTS, *broken, seconds=15)
    load.wait_for(20)
    # One pod a role is given up at most: the others wait for it.
    assert len(release.ready_pods("router")) == 2
    assert len(release.ready_pods("worker", "prefill")) == 1
    assert len(release.ready_pods("worker", "colocated")) == 1
    helm("rollback", release.name, "--force-conflicts")
    # A StatefulSet does not take back a pod that never came up; the chart's README says so.
    for pod in release.pods("worker"):
        if pod["status"]["phase"] == "Pending":
            kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
    release.wait_for_workers(4)
    load.wait_for(10)


# -- the table of counts in the chart's README -------------------------------------------------


def test_after_a_scale_the_same_value_keeps_what_runs(release: Release) -> None:
    scale(release, "decode", 1)
    release.upgrade(*COUNTS, wait=False)
    assert release.sets() == {"prefill": 2, "decode": 1, "colocated": 2}


def test_after_a_scale_another_value_is_a_conflict_until_it_is_forced(release: Release) -> None:
    before = release.sets()
    with pytest.raises(CommandFailed, match="conflict"):
        release.upgrade("--set", "prefill=2,colocated=2,decode=2", wait=False)
    assert release.sets() == before
    release.upgrade("--set", "prefill=2,colocated=2,decode=2", "--force-conflicts", wait=False)
    assert release.sets() == {"prefill": 2, "decode": 2, "colocated": 2}


def test_a_scale_to_the_new_value_is_no_conflict(release: Release) -> None:
    scale(release, "decode", 1)
    release.upgrade("--set", "prefill=2,colocated=2,decode=1", wait=False)
    assert release.sets()["decode"] == 1


def test_a_changed_value_wins_where_nothing_was_scaled(release: Release) -> None:
    release.upgrade("--set", "prefill=2,colocated=2,decode=0", "--force-conflicts", wait=False)
    release.upgrade("--set", "prefill=2,colocated=3,decode=0", wait=False)
    assert release.sets() == {"prefill": 2, "decode": 0, "colocated": 3}


def test_a_rollback_restores_that_revision_s_count(release: Release) -> None:
    helm("rollback", release.name, str(revision(release) - 1))
    assert release.sets()["colocated"] == 2
    scale(release, "colocated", 1)
    with pytest.raises(CommandFailed, match="conflict"):
        helm("rollback", release.name, str(revision(release) - 1))
    helm("rollback", release.name, str(revision(release) - 2), "--force-conflicts")
    release.upgrade(*COUNTS, "--force-conflicts", wait=False)
    wait_until(lambda: release.sets()["colocated"] == 2, "two colocated workers")
    release.wait_for_workers(4)


def test_what_an_autoscaler_made_of_the_routers_is_kept(release: Release) -> None:
    scaled = (*COUNTS, "--set", "router.autoscaling.enabled=true,router.autoscaling.minReplicas=2")
    name = f"deployment/{release.fullname}-router"

    def replicas() -> int:
        return int(get("deployment", f"{release.fullname}-router")["spec"]["replicas"])

    release.upgrade(*scaled, wait=False)
    assert get("horizontalpodautoscalers")[0]["spec"]["minReplicas"] == 2
    assert replicas() == 2
    kubectl("scale", name, "--replicas=3")  # as the autoscaler does; it waits before it scales down
    release.upgrade(*scaled, wait=False)
    assert replicas() == 3
    release.upgrade(*COUNTS, "--force-conflicts", wait=False)
    kubectl("scale", name, "--replicas=2")
    wait_until(lambda: len(release.ready_pods("router")) == 2, "two routers")
