"""Scenario 4: losing a router; streams through ingress controllers of either class."""

import asyncio
import json
import time

import httpx
import pytest
from tests.cluster.conftest import COUNTS
from tests.cluster.kube import get, kubectl, wait_until
from tests.cluster.load import Load, a_client, body_of
from tests.cluster.release import HOST, Release
from tests.cluster.settings import INGRESS_CLASSES, INGRESS_URL

LONG_QUESTION = "Count from 1 to 30."


def test_a_deleted_router_costs_no_answer_of_a_client_that_retries(
    release: Release, retrying_load: Load
) -> None:
    before = release.uids("router")
    victim = min(before)
    kubectl("delete", "pod", victim, "--wait=false")
    retrying_load.wait_for(20)
    wait_until(
        lambda: len(release.ready_pods("router")) == 2 and victim not in release.uids("router"),
        "a new router",
    )
    killed = min(release.uids("router"))
    kubectl("delete", "pod", killed, "--grace-period=0", "--force")
    retrying_load.wait_for(20)
    wait_until(
        lambda: len(release.ready_pods("router")) == 2 and killed not in release.uids("router"),
        "another",
    )


async def arrival_times() -> list[float]:
    """When each chunk of text of a long stream arrived, seconds from the request."""
    body = body_of(LONG_QUESTION, stream=True, max_tokens=256, ignore_eos=True)
    times: list[float] = []
    async with a_client() as client:
        began = time.monotonic()
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    times.append(time.monotonic() - began)
                elif line == "data: [DONE]":
                    return times
    raise AssertionError(f"the stream ended early, after {len(times)} chunks")


@pytest.mark.parametrize("class_name", INGRESS_CLASSES)
def test_a_stream_arrives_step_by_step(release: Release, class_name: str) -> None:
    release.upgrade(*COUNTS, "--set", f"ingress.className={class_name}", wait=False)

    def is_served() -> bool:
        try:
            response = httpx.get(f"{INGRESS_URL}/v1/models", headers={"host": HOST})
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    def is_served_steadily() -> bool:
        """The old class's route goes and the new one's comes, in either order, within seconds."""
        for _ in range(25):
            if not is_served():
                return False
            time.sleep(0.25)
        return True

    wait_until(is_served_steadily, f"the ingress of class {class_name} serves")
    times = asyncio.run(arrival_times())
    assert len(times) >= 8
    # In one piece every chunk would come at the end.
    middle = times[len(times) // 2]
    assert times[0] < 0.8 * times[-1], times
    assert middle < 0.95 * times[-1], times
    assert len({round(each, 2) for each in times}) >= 6, times
    if class_name != "traefik":
        release.upgrade(*COUNTS, wait=False)
        wait_until(is_served_steadily, "the ingress as it was")


def test_the_ingress_allows_an_answer_of_ten_minutes(release: Release) -> None:
    annotations = get("ingress", release.fullname)["metadata"]["annotations"]
    nginx = "nginx.ingress.kubernetes.io"
    assert float(annotations[f"{nginx}/proxy-read-timeout"]) > 600
    assert float(annotations[f"{nginx}/proxy-send-timeout"]) > 600
    assert annotations[f"{nginx}/proxy-buffering"] == "off"
    spec = get("deployment", f"{release.fullname}-router")["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > 600
