"""Scenario 3: scaling, losing and draining workers under load."""

from tests.cluster.kube import get, kubectl, run, wait_until
from tests.cluster.load import Load
from tests.cluster.release import Release


def test_scaling_down_and_up(release: Release, load: Load) -> None:
    kubectl("scale", f"statefulset/{release.fullname}-colocated", "--replicas=1")
    release.wait_for_workers(3)
    load.wait_for(10)
    kubectl("scale", f"statefulset/{release.fullname}-colocated", "--replicas=2")
    release.wait_for_workers(4)
    load.wait_for(10)


def test_a_deleted_worker_finishes_or_hands_back_what_it_has(release: Release, load: Load) -> None:
    before = release.uids("worker")
    for pod in (f"{release.fullname}-colocated-0", f"{release.fullname}-prefill-0"):
        kubectl("delete", "pod", pod)
        wait_until(lambda pod=pod: release.uids("worker").get(pod) != before[pod], "a new pod")
        release.wait_for_workers(4)
    load.wait_for(10)


def test_a_worker_killed_without_grace_costs_no_answer(release: Release, load: Load) -> None:
    pod = f"{release.fullname}-colocated-1"
    before = release.uids("worker")[pod]
    kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    load.wait_for(10)
    wait_until(lambda: release.uids("worker").get(pod) != before, "a new pod")
    release.wait_for_workers(4)


def test_a_recreated_pod_starts_in_its_boot_role(release: Release, load: Load) -> None:
    pod = f"{release.fullname}-prefill-1"
    kubectl("annotate", "pod", pod, "sangam.io/role=colocated")
    release.wait_for_role(pod, "colocated")
    kubectl("delete", "pod", pod)
    wait_until(lambda: release.roles().get(pod) == "prefill", "the boot role", 120)
    release.wait_for_workers(4)


def test_draining_a_node_moves_everything_to_the_others(release: Release, load: Load) -> None:
    nodes = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in release.pods("worker")}
    redis = release.pods("redis")[0]["spec"]["nodeName"]
    node = next(name for name in sorted({*nodes.values()}) if name != redis)
    try:
        run(
            *("kubectl", "drain", node, "--ignore-daemonsets", "--delete-emptydir-data"),
            *("--timeout=150s", f"--pod-selector=app.kubernetes.io/instance={release.name}"),
            seconds=170,
        )
        release.wait_for_workers(4, 180)
        assert {p["spec"]["nodeName"] for p in release.pods("worker")} == {redis}
        load.wait_for(10)
    finally:
        run("kubectl", "uncordon", node)
    assert get("node", node)["spec"].get("unschedulable") is None
