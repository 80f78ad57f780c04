"""Cluster tests: one release, installed once, shared by the scenarios in the order of their files.

Without KUBECONFIG everything here is skipped, and also where the command line does not name this
folder: a plain ``make test`` must not install anything on whatever cluster KUBECONFIG names today.
``make test-cluster`` does both.
"""

import contextlib
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.cluster.kube import CommandFailed, kubectl, run
from tests.cluster.load import Load, References, ask_once, under_load
from tests.cluster.release import Release
from tests.cluster.settings import NAMESPACE

HERE = Path(__file__).parent
COUNTS = ("--set", "prefill=2,colocated=2")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_named = any("cluster" in str(word) for word in config.invocation_params.args)
    reason = ""
    if not is_named:
        reason = "cluster tests run only where they are named (make test-cluster)"
    elif not os.environ.get("KUBECONFIG"):
        reason = "no cluster: KUBECONFIG is not set (make test-cluster brings one up)"
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(600))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what the pods said when a test fails: at the end the namespace is gone."""
    report = yield
    folder = os.environ.get("SANGAM_TEST_LOGS")
    if report.failed and folder and HERE in item.path.parents:
        keep_logs(Path(folder) / f"{item.name}-{report.when}")
    return report


def keep_logs(folder: Path) -> None:
    """Objects, events and every pod's log, as files; what cannot be had is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = {
        "objects.txt": ("get", "pods,statefulsets,deployments", "-o", "wide"),
        "events.txt": ("get", "events", "--sort-by=.lastTimestamp"),
        "pods.txt": ("describe", "pods"),
    }
    with contextlib.suppress(CommandFailed):
        for name in kubectl("get", "pods", "-o", "name").split():
            commands[f"{name.removeprefix('pod/')}.log"] = ("logs", name, "--all-containers")
    for file, command in commands.items():
        with contextlib.suppress(CommandFailed):
            (folder / file).write_text(kubectl(*command))


@pytest.fixture(scope="session")
def namespace() -> Iterator[str]:
    """The tests' namespace, made and taken away."""
    run("kubectl", "create", "namespace", NAMESPACE)
    yield NAMESPACE
    run("kubectl", "delete", "namespace", NAMESPACE, "--timeout=120s", seconds=150)


@pytest.fixture(scope="session")
def release(namespace: str) -> Iterator[Release]:
    """The release under test: 2 prefill and 2 colocated workers, 2 routers."""
    installed = Release()
    began = time.monotonic()
    installed.upgrade(*COUNTS)
    answer = ask_once()
    print(f"\ninstalled, first answer {answer!r} after {time.monotonic() - began:.1f} s")  # noqa: T201
    assert answer.endswith("= 42"), answer
    yield installed
    if "sangam" in kubectl("get", "statefulsets", "-o", "name"):
        installed.uninstall()


@pytest.fixture(scope="session")
def references(release: Release) -> References:
    """What the undisturbed system answers."""
    return References.record()


@pytest.fixture
def load(release: Release, references: References) -> Iterator[Load]:
    """Load during the test; afterwards nothing has failed, and nothing is left reserved."""
    with under_load(references) as running:
        yield running
    release.wait_for_rest()


@pytest.fixture
def retrying_load(release: Release, references: References) -> Iterator[Load]:
    """The same with clients that ask again when a router has gone."""
    with under_load(references, may_retry=True) as running:
        yield running
    release.wait_for_rest()
