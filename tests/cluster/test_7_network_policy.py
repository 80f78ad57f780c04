"""Scenario 7: strangers reach neither Redis nor the routers' internal port, nor a worker."""

import pytest
from tests.cluster.conftest import COUNTS
from tests.cluster.kube import CommandFailed, get, kubectl, wait_until
from tests.cluster.load import Load
from tests.cluster.release import Release
from tests.cluster.settings import IMAGES, NODE_CIDR

CONNECT = "import socket,sys;socket.create_connection((sys.argv[1],int(sys.argv[2])),4);print('in')"
POST = (
    "import sys,urllib.request as u,urllib.error as e\n"
    "r=u.Request(sys.argv[1]+'/internal/v1/blocks',data=b'{}',headers=eval(sys.argv[2]))\n"
    "try: print(u.urlopen(r,timeout=5).status)\n"
    "except e.HTTPError as x: print(x.code)\n"
)


@pytest.fixture(scope="module")
def stranger(release: Release) -> str:
    """A pod that has nothing to do with the release."""
    name = "stranger"
    kubectl(
        *("run", name, "--image", IMAGES["router.image"], "--restart=Never"),
        *("--image-pull-policy=IfNotPresent", "--command", "--", "sleep", "900"),
    )
    wait_until(lambda: get("pod", name)["status"]["phase"] == "Running", "the stranger runs")
    return name


def reaches(pod: str, host: str, port: int) -> bool:
    """Whether a pod can connect."""
    try:
        script = ("python", "-c", CONNECT, host, str(port))
        return "in" in kubectl("exec", pod, "--", *script, seconds=30)
    except CommandFailed:
        return False


def test_without_the_nodes_range_policies_are_off(release: Release, stranger: str) -> None:
    assert get("networkpolicies") == []
    assert reaches(stranger, f"{release.fullname}-redis", 6379)


def test_with_it_a_stranger_reaches_only_the_public_port(
    release: Release, stranger: str, load: Load
) -> None:
    release.upgrade(*COUNTS, "--set", f"networkPolicy.nodeCIDRs={{{NODE_CIDR}}}")
    router = release.ready_pods("router")[0]["status"]["podIP"]
    wait_until(lambda: not reaches(stranger, f"{release.fullname}-redis", 6379), "Redis is shut")
    wait_until(lambda: not reaches(stranger, router, 8001), "the internal port is shut")
    assert reaches(stranger, router, 8000)
    load.wait_for(20)
    release.wait_for_workers(4)
    release.upgrade(*COUNTS)
    wait_until(lambda: reaches(stranger, f"{release.fullname}-redis", 6379), "open again")


def test_a_worker_refuses_calls_without_the_token(release: Release, stranger: str) -> None:
    url = next(iter(release.workers().values()))["url"]
    for headers in ({}, {"x-sangam-token": "guessed"}):
        script = ("python", "-c", POST, url, repr(headers))
        assert kubectl("exec", stranger, "--", *script).strip() == "401"
    kubectl("delete", "pod", stranger, "--grace-period=0", "--force")
