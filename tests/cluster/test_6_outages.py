"""Scenario 6: Redis, the API server and a worker's memory go, requests stay."""

import subprocess
import time

import pytest
from tests.cluster.kube import kubectl, wait_until
from tests.cluster.load import Load
from tests.cluster.release import Release
from tests.cluster.settings import APISERVER_OUTAGE, NAMESPACE

EAT = (
    "import os,time\n"
    "open('/proc/1/oom_score_adj','w').write('1000')\n"
    "while os.fork():\n"
    "    time.sleep(0.1)\n"
    "held=b'x'*(96<<20)\n"
    "time.sleep(60)\n"
)
"""Takes the container's memory in many small processes, so that the worker, the largest, is the one
that is killed (and all with it, as process 1)."""


def test_a_deleted_redis_costs_no_answer(release: Release, load: Load) -> None:
    before = release.uids("redis")
    kubectl("delete", "pod", *before)
    wait_until(lambda: {*release.uids("redis").values()}.isdisjoint(before.values()), "a new Redis")
    wait_until(lambda: len(release.ready_pods("redis")) == 1, "Redis is ready")
    load.wait_for(20)
    release.wait_for_workers(4)


def test_a_role_survives_a_redis_that_lost_it(release: Release, load: Load) -> None:
    pod = f"{release.fullname}-prefill-1"
    kubectl("annotate", "pod", pod, "sangam.io/role=colocated")
    release.wait_for_role(pod, "colocated")
    kubectl("delete", "pod", *release.uids("redis"))
    wait_until(lambda: len(release.ready_pods("redis")) == 1, "Redis is ready")
    release.wait_for_role(pod, "colocated", 60)
    wait_until(lambda: release.workers()[pod]["desired_role"] == "colocated", "written again")
    load.wait_for(10)
    kubectl("annotate", "pod", pod, "sangam.io/role-")
    release.wait_for_role(pod, "prefill")


@pytest.mark.skipif(not APISERVER_OUTAGE, reason="SANGAM_TEST_APISERVER_OUTAGE names no command")
def test_requests_and_roles_go_on_without_an_api_server(release: Release, load: Load) -> None:
    pod = f"{release.fullname}-prefill-1"
    kubectl("annotate", "pod", pod, "sangam.io/role=colocated")
    release.wait_for_role(pod, "colocated")
    before = release.uids("worker") | release.uids("router")
    outage = subprocess.Popen(APISERVER_OUTAGE, stdout=subprocess.DEVNULL)
    began = time.monotonic()
    answered = load.num_answers
    assert outage.wait(timeout=120) == 0
    print(f"\nthe API server was away for {time.monotonic() - began:.0f} s")  # noqa: T201
    assert load.num_answers - answered >= 20
    load.wait_for(10)
    release.wait_for_role(pod, "colocated")
    assert release.uids("worker") | release.uids("router") == before
    kubectl("annotate", "pod", pod, "sangam.io/role-")  # the watch has come back
    release.wait_for_role(pod, "prefill", 60)
    wait_until(lambda: release.fleet()["watcher"]["is_synced"], "the pods are followed again")


def test_a_worker_that_is_killed_for_its_memory_costs_no_answer(
    release: Release, load: Load
) -> None:
    pod = f"{release.fullname}-colocated-1"
    command = ["kubectl", "-n", NAMESPACE, "exec", pod, "--", "python", "-c", EAT]
    eater = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def was_killed() -> bool:
        status = next(p for p in release.pods("worker") if p["metadata"]["name"] == pod)["status"]
        last = status["containerStatuses"][0].get("lastState", {}).get("terminated", {})
        return bool(last.get("reason") == "OOMKilled")

    wait_until(was_killed, "the worker was OOM-killed", 90)
    eater.kill()
    eater.wait()
    load.wait_for(10)
    release.wait_for_workers(4)
