"""The commands against an API server over real HTTP, routers by real port-forwards."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.router.kubectl.fake_cluster import FakeCluster, a_fake_cluster, write_kubeconfig
from typer.testing import CliRunner, Result

from sangam_router.fleet_watch import annotations
from sangam_router.kubectl import pods
from sangam_router.kubectl.cli import app

Run = Callable[..., Result]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with a_fake_cluster(prefill=2, colocated=2) as cluster:
        yield cluster


@pytest.fixture
def run(cluster: FakeCluster, tmp_path: Path) -> Run:
    kubeconfig = write_kubeconfig(tmp_path, cluster.url)

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--kubeconfig", str(kubeconfig)])

    return run


def test_the_watcher_reads_the_annotations_that_the_plugin_writes() -> None:
    for name in ("ROLE_ANNOTATION", "DRAIN_ANNOTATION", "BOOT_ROLE_LABEL"):
        assert getattr(pods, name) == getattr(annotations, name)


# -- status ------------------------------------------------------------------------------------


def test_status_shows_roles_loads_and_the_line(cluster: FakeCluster, run: Run) -> None:
    cluster.held_blocks["sangam-prefill-0"] = 2
    result = run("status")
    assert result.exit_code == 0
    [line] = [line for line in result.output.splitlines() if line.startswith("sangam-prefill-0")]
    assert line.split() == [
        "sangam-prefill-0", "node-0", "prefill", "prefill", "prefill", "200", "62/64", "2", "0",
        "9.9", "serving",
    ]  # fmt: skip
    assert "waiting   3 for a prefill, 1 to decode" in result.output
    assert "sangam-router-1 (node-0): ready, follows the pods" in result.output


def test_status_shows_the_schedulers_reason(cluster: FakeCluster, run: Run) -> None:
    cluster.make_unschedulable("sangam-prefill-1", "0/2 nodes: Insufficient nvidia.com/gpu. " * 9)
    assert (
        f"Pending: {'0/2 nodes: Insufficient nvidia.com/gpu. ' * 9}".rstrip()
        in run("status").output
    )


def test_status_shows_refused_wishes(cluster: FakeCluster, run: Run) -> None:
    cluster.annotations("sangam-prefill-1")[pods.ROLE_ANNOTATION] = "banana"
    assert "refused: banana (unknown_role)" in run("status").output


def test_status_shows_what_routers_remark(cluster: FakeCluster, run: Run) -> None:
    cluster.remark = "workers differ in SANGAM_QUANTIZATION"
    assert cluster.remark in run("status").output
    assert json.loads(run("status", "-o", "json").output)["problems"] == [cluster.remark]


def test_status_without_a_router_shows_the_pods_and_says_what_is_missing(
    cluster: FakeCluster, run: Run
) -> None:
    cluster.dead_routers = {"sangam-router-0", "sangam-router-1"}
    result = run("status")
    assert result.exit_code == 0
    assert "sangam-colocated-1" in result.output
    assert "router sangam-router-0: " in result.output
    assert "connection refused" in result.output
    assert "no router answers" in result.output


def test_status_as_json_has_every_worker_and_router(run: Run) -> None:
    body = json.loads(run("status", "-o", "json").output)
    assert [worker["pod"] for worker in body["workers"]] == [
        "sangam-colocated-0", "sangam-colocated-1", "sangam-prefill-0", "sangam-prefill-1",
    ]  # fmt: skip
    assert body["waiting"]["num_prefills"] == 3
    assert body["problems"] == []


def test_status_wide_has_the_workers_ids(run: Run) -> None:
    assert "uid-of-sangam-prefill-0" in run("status", "-o", "wide").output


def test_status_wide_has_the_longest_sequences(cluster: FakeCluster, run: Run) -> None:
    cluster.max_sequence_tokens = 4097
    assert "4097" in run("status", "-o", "wide").output
    assert "4097" not in run("status").output
    body = json.loads(run("status", "-o", "json").output)
    assert {each["worker"]["max_sequence_tokens"] for each in body["workers"]} == {4097}


def test_status_says_what_differs_on_workers_that_cannot_be_used(
    cluster: FakeCluster, run: Run
) -> None:
    reason = "block_length 16, here 32 (SANGAM_BLOCK_LENGTH)"
    cluster.misfits = [
        {"worker_id": "uid-of-sangam-prefill-0", "model": "m", "protocol": 2, "reason": reason},
        {"worker_id": "other", "model": "big", "protocol": 2},  # of an older router
    ]
    assert json.loads(run("status", "-o", "json").output)["problems"] == [
        f"incompatible worker sangam-prefill-0: {reason}; it gets no work",
        "incompatible worker other: model big, protocol 2; it gets no work",
    ]


# -- rebalance -----------------------------------------------------------------------------------


def test_the_least_loaded_worker_is_annotated_and_verified(cluster: FakeCluster, run: Run) -> None:
    cluster.held_blocks["sangam-prefill-1"] = 5
    result = run("rebalance", "prefill=1", "colocated=3")
    assert result.exit_code == 0
    assert cluster.annotations("sangam-prefill-0") == {pods.ROLE_ANNOTATION: "colocated"}
    assert cluster.annotations("sangam-prefill-1") == {}
    assert "the routers see prefill=1 colocated=3" in result.output


def test_a_worker_that_returns_to_its_boot_role_loses_the_annotation(
    cluster: FakeCluster, run: Run
) -> None:
    run("rebalance", "prefill=1", "colocated=3")
    assert run("rebalance", "prefill=2", "colocated=2").exit_code == 0
    for name in ("sangam-prefill-0", "sangam-prefill-1"):
        assert cluster.annotations(name) == {}


def test_what_is_so_already_changes_nothing(cluster: FakeCluster, run: Run) -> None:
    result = run("rebalance", "prefill=2", "colocated=2")
    assert "nothing to do" in result.output
    assert cluster.patches == []


def test_a_dry_run_changes_nothing(cluster: FakeCluster, run: Run) -> None:
    result = run("rebalance", "prefill=1", "colocated=3", "--persist", "--dry-run")
    assert "1. sangam-prefill-1: prefill -> colocated" in result.output
    assert "3. sangam-colocated: 2 -> 3, sangam-colocated-2 comes" in result.output
    assert cluster.patches == []


def test_persist_moves_pods_between_the_sets(cluster: FakeCluster, run: Run) -> None:
    result = run("rebalance", "prefill=1", "colocated=3", "--persist")
    assert result.exit_code == 0, result.output
    counts = {name: each["spec"]["replicas"] for name, each in cluster.sets.items()}
    assert counts == {"sangam-prefill": 1, "sangam-decode": 0, "sangam-colocated": 3}
    assert all(not each["metadata"]["annotations"] for each in cluster.sets.values())
    assert all(not cluster.annotations(name) for name in cluster.pods)
    assert [name for name, _ in cluster.patches] == [
        "sangam-prefill-1", "sangam-prefill", "sangam-colocated", "sangam-prefill",
    ]  # fmt: skip


def test_an_interrupted_persist_is_taken_up_and_keeps_others_from_planning_around_it(
    cluster: FakeCluster, run: Run
) -> None:
    cluster.sets["sangam-prefill"]["spec"]["replicas"] = 1
    cluster.sets["sangam-prefill"]["metadata"]["annotations"][pods.OWES_ANNOTATION] = "colocated=3"
    del cluster.pods["sangam-prefill-1"], cluster.roles["sangam-prefill-1"]
    refused = run("rebalance", "prefill=1", "colocated=2")
    assert refused.exit_code == 1
    assert "still owes a pod" in refused.output
    assert run("rebalance", "prefill=1", "colocated=3", "--persist").exit_code == 0
    assert "sangam-colocated-2" in cluster.pods
    assert cluster.sets["sangam-prefill"]["metadata"]["annotations"] == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["prefill=5", "colocated=3"], "makes 8 workers, but the fleet has 4"),
        (["prefill=4"], "nobody would decode"),
        (["prefil=2", "colocated=2"], "did you mean prefill?"),
        (["prefill=-1", "colocated=5"], "0 or more"),
    ],
)
def test_an_impossible_split_is_told_in_one_line(
    cluster: FakeCluster, run: Run, words: list[str], text: str
) -> None:
    result = run("rebalance", *words)
    assert result.exit_code == 1
    assert text in result.output
    assert cluster.patches == []


def test_pods_that_are_not_ready_are_named(cluster: FakeCluster, run: Run) -> None:
    cluster.make_unschedulable("sangam-prefill-1", "Insufficient nvidia.com/gpu")
    result = run("rebalance", "prefill=1", "colocated=3")
    assert result.exit_code == 1
    assert "not enough pods are ready: 3 of 4" in result.output
    assert "sangam-prefill-1: Pending: Insufficient nvidia.com/gpu" in result.output


def test_a_router_that_dies_is_replaced_by_another(cluster: FakeCluster, run: Run) -> None:
    cluster.dead_routers = {"sangam-router-0"}
    assert run("rebalance", "prefill=1", "colocated=3").exit_code == 0
    assert {*cluster.asked} == {"sangam-router-1"}


def test_no_router_at_all_is_told_before_anything_is_changed(
    cluster: FakeCluster, run: Run
) -> None:
    cluster.dead_routers = {"sangam-router-0", "sangam-router-1"}
    result = run("rebalance", "prefill=1", "colocated=3")
    assert result.exit_code == 1
    assert "no router answers" in result.output
    assert cluster.patches == []


def test_routers_that_follow_no_pods_are_told(cluster: FakeCluster, run: Run) -> None:
    cluster.is_watching = False
    result = run("rebalance", "prefill=1", "colocated=3")
    assert "fleetWatcher.enabled=true" in result.output
    assert cluster.patches == []


def test_what_takes_too_long_ends_with_what_is_missing(cluster: FakeCluster, run: Run) -> None:
    cluster.held_blocks["sangam-colocated-0"] = 10**6
    result = run("drain", "sangam-colocated-0", "--timeout", "1s")
    assert result.exit_code == 1
    assert "not done after 1 s" in result.output
    assert "blocks" in result.output


# -- drain ---------------------------------------------------------------------------------------


def test_drain_waits_until_the_worker_is_empty(cluster: FakeCluster, run: Run) -> None:
    cluster.held_blocks["sangam-prefill-1"] = 2
    result = run("drain", "pod/sangam-prefill-1")
    assert result.exit_code == 0
    assert cluster.held_blocks["sangam-prefill-1"] == 0
    assert cluster.annotations("sangam-prefill-1") == {pods.DRAIN_ANNOTATION: "true"}
    assert run("undrain", "sangam-prefill-1").exit_code == 0
    assert cluster.annotations("sangam-prefill-1") == {}


def test_the_last_worker_that_decodes_is_not_drained(cluster: FakeCluster, run: Run) -> None:
    assert run("drain", "sangam-colocated-0").exit_code == 0
    result = run("drain", "sangam-colocated-1")
    assert result.exit_code == 1
    assert "the last worker that decodes" in result.output
    assert cluster.annotations("sangam-colocated-1") == {}


def test_force_leaves_the_wish_and_tells_that_the_routers_refuse_it(
    cluster: FakeCluster, run: Run
) -> None:
    run("drain", "sangam-colocated-0")
    result = run("drain", "sangam-colocated-1", "--force")
    assert result.exit_code == 1
    assert "refuse to drain sangam-colocated-1 (last_decode_worker)" in result.output
    assert cluster.annotations("sangam-colocated-1") == {pods.DRAIN_ANNOTATION: "true"}


def test_an_unknown_pod_is_told_with_those_there_are(run: Run) -> None:
    result = run("drain", "sangam-prefill-7")
    assert result.exit_code == 1
    assert "there are: sangam-colocated-0, sangam-colocated-1" in result.output


# -- finding the release -------------------------------------------------------------------------


def test_several_releases_must_be_told_apart(cluster: FakeCluster, run: Run) -> None:
    cluster.add_release("blue-sangam", colocated=1)
    result = run("status")
    assert result.exit_code == 1
    assert "blue-sangam, sangam; name one with --release" in result.output
    named = run("status", "-r", "blue-sangam")
    assert "blue-sangam-colocated-0" in named.output
    assert "router    blue-sangam-router-0" in named.output
    assert "router    sangam-router-0" not in named.output


def test_a_release_that_is_not_there_is_told_with_those_there_are(run: Run) -> None:
    assert "no release 'red'" in run("status", "--release", "red").output


def test_an_unknown_context_is_told(run: Run) -> None:
    result = run("status", "--context", "nowhere")
    assert result.exit_code == 1
    assert "nowhere" in result.output


def test_an_api_server_that_refuses_now_is_told(cluster: FakeCluster, run: Run) -> None:
    cluster.fail_requests = 1
    result = run("status")
    assert result.exit_code == 1
    assert "not today" in result.output


def test_a_duration_that_cannot_be_read_is_refused(run: Run) -> None:
    assert run("rebalance", "colocated=4", "--timeout", "soon").exit_code == 2
