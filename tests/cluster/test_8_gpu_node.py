"""Scenario 8: eight GPU workers share a node's network; a ninth waits, and is shown to wait."""

from collections.abc import Iterator

import pytest
from tests.cluster.kube import get, kubectl, wait_until
from tests.cluster.load import ask_once
from tests.cluster.release import Release
from tests.cluster.test_2_roles import plugin

HOST = "gpus.test"
FLAGS = (
    *("--set", "prefill=3,colocated=5,decode=0,router.replicas=1"),
    *("--set", "workers.defaults.gpus=1,workers.defaults.hostNetwork=true"),
    # The small model on CPU: nothing stands behind the GPUs that the node claims.
    *("--set", "workers.defaults.settings.device=cpu,workers.defaults.settings.dtype=float32"),
    *("--set", f"ingress.host={HOST}"),
)


@pytest.fixture(scope="module")
def gpu_release(release: Release) -> Iterator[Release]:
    """A release of its own; the other one steps aside for its memory and cores."""
    kubectl(
        "scale",
        *(f"statefulset/{release.fullname}-{r}" for r in ("prefill", "colocated")),
        "--replicas=0",
    )
    gpus = Release("sangam-gpus")
    gpus.upgrade(*FLAGS, seconds=280)
    yield gpus
    gpus.uninstall()


def test_eight_workers_share_a_node_without_a_clash(gpu_release: Release) -> None:
    gpu_release.wait_for_workers(8, 240)
    pods = gpu_release.pods("worker")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 1
    assert all(pod["spec"]["hostNetwork"] for pod in pods)
    assert not any(c.get("ports") for pod in pods for c in pod["spec"]["containers"])
    urls = {worker["url"] for worker in gpu_release.workers().values()}
    ports = {int(url.rpartition(":")[2]) for url in urls}
    assert len(ports) == 8
    assert all(20000 <= port <= 29999 for port in ports)
    assert ask_once(host=HOST).endswith("= 42")
    gpu_release.wait_for_rest()


def test_a_ninth_stays_pending_and_the_status_says_why(gpu_release: Release) -> None:
    kubectl("scale", f"statefulset/{gpu_release.fullname}-colocated", "--replicas=6")
    name = f"{gpu_release.fullname}-colocated-5"

    def reason() -> str:
        conditions = get("pod", name)["status"].get("conditions", [])
        return next(
            (c["message"] for c in conditions if c["type"] == "PodScheduled" and "message" in c), ""
        )

    assert "Insufficient nvidia.com/gpu" in wait_until(reason, "the scheduler says no")
    shown = " ".join(plugin("status", "--release", gpu_release.name).split())
    assert name in shown
    assert "Insufficient" in shown
    assert ask_once(host=HOST).endswith("= 42")
