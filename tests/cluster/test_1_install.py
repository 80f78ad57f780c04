"""Scenario 1: from nothing to the first right answer; installing again changes nothing."""

import json
from typing import Any

from tests.cluster.conftest import COUNTS
from tests.cluster.kube import CommandFailed, get, helm, kubectl
from tests.cluster.load import Load, References
from tests.cluster.release import Release
from tests.cluster.settings import NAMESPACE

KINDS = ("deployments", "statefulsets", "secrets", "services", "ingresses", "configmaps")


def what_is_there() -> dict[str, Any]:
    """Generations of workloads, data of the rest; Helm's own records apart."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        for each in get(kind):
            metadata = each["metadata"]
            if metadata["name"].startswith("sh.helm.release"):
                continue
            content = each.get("data") or json.dumps(each.get("spec"), sort_keys=True)
            found[f"{kind}/{metadata['name']}"] = (metadata["uid"], content)
    return found


def test_a_release_answers_right(release: Release, references: References) -> None:
    assert len(references.answers) == 40
    assert release.sets() == {"prefill": 2, "decode": 0, "colocated": 2}
    release.wait_for_workers(4)
    assert sorted(release.roles().values()) == ["colocated", "colocated", "prefill", "prefill"]
    release.wait_for_rest()


def test_helm_test_asks_a_question_and_passes(release: Release) -> None:
    assert "Succeeded" in helm("test", release.name, "--logs", "--timeout", "90s")


def test_installing_again_changes_nothing(release: Release, load: Load) -> None:
    before, workers = what_is_there(), release.uids("worker") | release.uids("router")
    release.upgrade(*COUNTS)
    assert what_is_there() == before
    assert release.uids("worker") | release.uids("router") == workers


def test_workers_get_no_api_permission_and_routers_only_pods(release: Release) -> None:
    for component, may_watch in (("router", True), ("worker", False)):
        who = f"system:serviceaccount:{NAMESPACE}:{release.fullname}-{component}"
        assert is_allowed(who, "watch", "pods") is may_watch
        for verb, kind in (("get", "secrets"), ("patch", "pods"), ("delete", "pods")):
            assert not is_allowed(who, verb, kind)


def is_allowed(who: str, verb: str, kind: str) -> bool:
    """Whether an account may do something; kubectl fails for a no."""
    try:
        return kubectl("auth", "can-i", verb, kind, f"--as={who}").strip() == "yes"
    except CommandFailed:
        return False
