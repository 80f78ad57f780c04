"""Scenario 2: GPUs move between roles live, by annotation and by the plugin."""

import subprocess
import time

import pytest
from tests.cluster.kube import CommandFailed, kubectl, wait_until
from tests.cluster.load import Load
from tests.cluster.release import Release
from tests.cluster.settings import NAMESPACE


def annotate(pod: str, annotation: str) -> None:
    kubectl("annotate", "pod", pod, annotation, "--overwrite")


def test_a_role_follows_the_annotation_and_returns_without_it(release: Release, load: Load) -> None:
    pod = f"{release.fullname}-prefill-1"
    before = release.workers()[pod]
    began = time.monotonic()
    annotate(pod, "sangam.io/role=colocated")
    release.wait_for_role(pod, "colocated")
    print(f"\nswitched after {time.monotonic() - began:.1f} s")  # noqa: T201
    load.wait_for(20)
    after = release.workers()[pod]
    assert after["worker_id"] == before["worker_id"]
    assert after["epoch"] != before["epoch"]
    assert after["boot_role"] == "prefill"
    annotate(pod, "sangam.io/role-")
    release.wait_for_role(pod, "prefill")
    load.wait_for(10)
    restarts = [p["status"]["containerStatuses"][0]["restartCount"] for p in release.pods("worker")]
    assert restarts == [0, 0, 0, 0]


def test_a_wish_for_an_unknown_role_is_refused_where_it_can_be_seen(
    release: Release, load: Load
) -> None:
    pod = f"{release.fullname}-prefill-0"
    annotate(pod, "sangam.io/role=chef")
    wait_until(lambda: release.workers()[pod]["refused"], "refused")
    refused = release.workers()[pod]["refused"]
    assert (refused["role"], refused["reason"]) == ("chef", "unknown_role")
    assert release.roles()[pod] == "prefill"
    load.wait_for(5)
    annotate(pod, "sangam.io/role-")
    wait_until(lambda: release.workers()[pod]["refused"] is None, "the refusal is gone")


def test_the_last_worker_that_decodes_stays(release: Release, load: Load) -> None:
    first, last = f"{release.fullname}-colocated-0", f"{release.fullname}-colocated-1"
    annotate(first, "sangam.io/drain=true")
    wait_until(lambda: release.workers()[first]["is_draining"], "drained")
    annotate(last, "sangam.io/role=prefill")
    wait_until(lambda: release.workers()[last]["refused"], "refused")
    assert release.workers()[last]["refused"]["reason"] == "last_decode_worker"
    load.wait_for(10)
    assert release.roles()[last] == "colocated"
    annotate(first, "sangam.io/drain-")
    release.wait_for_role(last, "prefill")  # granted at a resync, now that another decodes
    annotate(last, "sangam.io/role-")
    release.wait_for_role(last, "colocated")


def plugin(*arguments: str, seconds: float = 120) -> str:
    """``kubectl sangam``; what it prints."""
    command = ["kubectl", "sangam", *arguments, "-n", NAMESPACE]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, env=None
    )
    output = done.stdout + done.stderr
    if done.returncode:
        raise CommandFailed(command, output)
    return output


def test_rebalance_moves_workers_and_status_shows_it(release: Release, load: Load) -> None:
    plugin("rebalance", "prefill=1", "colocated=3")
    roles = sorted(release.roles().values())
    assert roles == ["colocated", "colocated", "colocated", "prefill"]
    shown = plugin("status")
    for pod in release.uids("worker"):
        assert pod in shown
    assert "colocated" in shown
    load.wait_for(10)
    plugin("rebalance", "prefill=2", "colocated=2")
    assert sorted(release.roles().values()) == ["colocated", "colocated", "prefill", "prefill"]
    return_home(release)  # the least loaded moved, which need not be those that moved before


def test_a_persistent_rebalance_scales_the_sets(release: Release, load: Load) -> None:
    plugin("rebalance", "prefill=1", "colocated=3", "--persist", seconds=200)
    assert release.sets() == {"prefill": 1, "decode": 0, "colocated": 3}
    release.wait_for_workers(4)
    assert {w["boot_role"] for n, w in release.workers().items() if "colocated" in n} == {
        "colocated"
    }
    load.wait_for(10)
    plugin("rebalance", "prefill=2", "colocated=2", "--persist", seconds=200)
    assert release.sets() == {"prefill": 2, "decode": 0, "colocated": 2}
    release.wait_for_workers(4)
    return_home(release)


def return_home(release: Release) -> None:
    """Take every wish back: each pod serves in the role it booted in."""
    for pod in release.uids("worker"):
        annotate(pod, "sangam.io/role-")
    for pod, worker in release.workers().items():
        release.wait_for_role(pod, worker["boot_role"])


def test_an_impossible_split_is_refused_in_words(release: Release) -> None:
    for split, words in (
        (("prefill=4", "colocated=0"), "nobody would decode"),
        (("prefill=7", "colocated=2"), "makes 9 workers, but the fleet has 4"),
        (("prefil=2", "colocated=2"), "did you mean prefill"),
    ):
        with pytest.raises(CommandFailed, match=words):
            plugin("rebalance", *split)
    assert sorted(release.roles().values()) == ["colocated", "colocated", "prefill", "prefill"]


def test_drain_and_undrain(release: Release, load: Load) -> None:
    pod = f"{release.fullname}-colocated-1"
    plugin("drain", pod)
    assert release.workers()[pod]["is_draining"]
    assert release.workers()[pod]["num_running"] == 0
    load.wait_for(10)
    plugin("undrain", pod)
    release.wait_for_role(pod, "colocated")


def test_a_watched_status_follows_the_fleet(release: Release) -> None:
    watching = subprocess.Popen(
        ["kubectl", "sangam", "status", "-w", "-n", NAMESPACE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pod = f"{release.fullname}-prefill-1"
    try:
        time.sleep(4)
        annotate(pod, "sangam.io/role=colocated")
        release.wait_for_role(pod, "colocated")
        time.sleep(4)
    finally:
        watching.terminate()
        output, _ = watching.communicate(timeout=20)
        annotate(pod, "sangam.io/role-")
        release.wait_for_role(pod, "prefill")
    before, after = output.find("prefill"), output.rfind("colocated")
    assert 0 <= before < after
    assert output.count(pod) >= 2, output
