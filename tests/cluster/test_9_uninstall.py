"""Scenario 9: nothing is left, and a wrong value makes nothing."""

import pytest
from tests.cluster.kube import CommandFailed, get, helm
from tests.cluster.release import Release
from tests.cluster.settings import CHART

KINDS = (
    "deployments,statefulsets,pods,services,ingresses,secrets,configmaps,serviceaccounts,roles,"
    "rolebindings,poddisruptionbudgets,networkpolicies,horizontalpodautoscalers,"
    "persistentvolumeclaims,jobs"
)
OF_THE_CLUSTER = {"default", "kube-root-ca.crt"}


def left() -> list[str]:
    """Objects of the namespace that are not the cluster's own."""
    return sorted(
        f"{each['kind']}/{each['metadata']['name']}"
        for each in get(KINDS)
        if each["metadata"]["name"] not in OF_THE_CLUSTER
    )


def test_uninstalling_leaves_nothing(release: Release) -> None:
    assert left()
    release.uninstall()
    assert left() == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("workers.prefill.gpu=1", "gpu"),
        ("prefill=2,colocated=0,decode=0", "decode"),
        ("prefill=-1", "prefill"),
        ("networkPolicy.nodeCIDRs={10.0.0.0/99}", "nodeCIDRs"),
    ],
)
def test_a_wrong_value_fails_before_anything_is_made(
    namespace: str, values: str, words: str
) -> None:
    with pytest.raises(CommandFailed, match=words):
        helm("install", "wrong", str(CHART), "--set", values)
    assert left() == []
