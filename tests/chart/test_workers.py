"""Worker pods as rendered: one GPU each, eight to a node, nothing that clashes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.helm import (
    CHART,
    EVERYTHING,
    SCENARIOS,
    Helm,
    Rendered,
    component,
    container,
    environment,
)

ROLES = {"prefill", "decode", "colocated"}
PROBE = ["python", "-m", "sangam_worker.probe"]


def pod(each: dict[str, Any]) -> dict[str, Any]:
    return dict(each["spec"]["template"]["spec"])


@pytest.fixture(params=SCENARIOS, ids=lambda path: path.stem)
def scenario(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    return helm.render(request.param)


def test_each_role_has_a_set_even_at_zero(scenario: Rendered) -> None:
    roles = {s["metadata"]["labels"]["sangam.io/boot-role"]: s for s in scenario.workers}
    assert set(roles) == ROLES
    assert {s["metadata"]["name"] for s in scenario.workers} == {f"sangam-{r}" for r in ROLES}
    for role, each in roles.items():
        assert environment(each)["SANGAM_ROLE"] == role
        count = each["metadata"]["annotations"]["sangam.io/rendered-replicas"]
        assert count == str(each["spec"]["replicas"])


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("colocated", {"prefill": 0, "colocated": 8, "decode": 0}),
        ("disaggregated", {"prefill": 5, "colocated": 0, "decode": 3}),
        ("hybrid", {"prefill": 5, "colocated": 3, "decode": 0}),
    ],
)
def test_the_papers_modes_have_the_papers_counts(
    helm: Helm, name: str, counts: dict[str, int]
) -> None:
    rendered = helm.render(CHART / "ci" / f"{name}-values.yaml")
    assert {
        s["metadata"]["labels"]["sangam.io/boot-role"]: s["spec"]["replicas"]
        for s in rendered.workers
    } == counts


def test_counts_are_plain_settings_on_the_command_line(helm: Helm) -> None:
    rendered = helm.render(None, "prefill=5", "colocated=3")
    assert rendered.one("StatefulSet", "sangam-prefill")["spec"]["replicas"] == 5
    assert rendered.one("StatefulSet", "sangam-colocated")["spec"]["replicas"] == 3


def test_a_gpu_worker_is_on_the_host_network_with_one_gpu(default: Rendered) -> None:
    for each in default.workers:
        assert pod(each)["hostNetwork"] is True
        assert pod(each)["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert container(each)["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert environment(each)["SANGAM_DEVICE"] == "cuda:0"
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod(each)[
            "tolerations"
        ]


def test_a_cpu_worker_asks_for_no_gpu_and_no_host_network(helm: Helm) -> None:
    for each in helm.render(CHART / "ci/cpu-values.yaml").workers:
        assert "hostNetwork" not in pod(each)
        assert "nvidia.com/gpu" not in json.dumps(container(each)["resources"])
        assert environment(each)["SANGAM_DEVICE"] == "cpu"
        assert environment(each)["SANGAM_DTYPE"] == "float32"


def test_no_worker_declares_a_port(scenario: Rendered) -> None:
    for each in scenario.workers:
        assert "ports" not in container(each)
        assert "hostPort" not in json.dumps(each)
        low, high = map(int, environment(each)["SANGAM_PORT_RANGE"].split("-"))
        assert 1024 <= low < high < 30000
        assert "SANGAM_PORT" not in environment(each)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert set(container(each)[probe]) & {"httpGet", "tcpSocket", "grpc"} == set()


def test_probes_run_in_the_container_and_leaving_drains(scenario: Rendered) -> None:
    for each in scenario.workers:
        worker = container(each)
        assert worker["startupProbe"]["exec"]["command"] == [*PROBE, "startup"]
        assert worker["readinessProbe"]["exec"]["command"] == [*PROBE, "ready"]
        assert worker["livenessProbe"]["exec"]["command"] == [*PROBE, "live"]
        assert worker["lifecycle"]["preStop"]["exec"]["command"] == [*PROBE, "drain"]


def test_gpu_workers_have_time_to_load_16_gigabytes(default: Rendered) -> None:
    for each in default.workers:
        probe = container(each)["startupProbe"]
        # 16 GB of weights from a slow disk, and FlashInfer's kernels compiled on few CPUs.
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
        lenient = container(each)["livenessProbe"]
        assert lenient["periodSeconds"] * lenient["failureThreshold"] >= 60


def test_the_grace_period_holds_the_drain(scenario: Rendered) -> None:
    for each in scenario.workers:
        drain = float(environment(each)["SANGAM_DRAIN_DEADLINE_SECONDS"])
        assert pod(each)["terminationGracePeriodSeconds"] >= drain + 15


def test_a_role_may_differ_in_everything(helm: Helm) -> None:
    rendered = helm.render(
        {
            "workers": {
                "defaults": {"nodeSelector": {"pool": "a"}},
                "decode": {
                    "nodeSelector": {"disk": "fast"},
                    "resources": {"limits": {"memory": "96Gi"}},
                    "drainDeadlineSeconds": 90,
                    "settings": {"poolBytes": 40000000000},
                },
            }
        }
    )
    decode = rendered.one("StatefulSet", "sangam-decode")
    other = rendered.one("StatefulSet", "sangam-prefill")
    assert pod(decode)["nodeSelector"] == {"pool": "a", "disk": "fast"}
    assert pod(other)["nodeSelector"] == {"pool": "a"}
    assert container(decode)["resources"]["limits"] == {"memory": "96Gi", "nvidia.com/gpu": 1}
    assert container(other)["resources"]["limits"]["memory"] == "48Gi"
    assert pod(decode)["terminationGracePeriodSeconds"] == 120
    assert environment(decode)["SANGAM_POOL_BYTES"] == "40000000000"
    assert "SANGAM_POOL_BYTES" not in environment(other)


def test_an_update_never_needs_a_spare_gpu(scenario: Rendered) -> None:
    for each in scenario.workers:
        assert each["spec"]["podManagementPolicy"] == "Parallel"
        assert each["spec"]["updateStrategy"]["type"] == "RollingUpdate"
        assert "maxSurge" not in json.dumps(each["spec"]["updateStrategy"])


def test_a_worker_is_known_by_its_pods_uid_and_name(scenario: Rendered) -> None:
    for each in scenario.workers:
        paths = {
            name: value["fieldRef"]["fieldPath"]
            for name, value in environment(each).items()
            if isinstance(value, dict) and "fieldRef" in value
        }
        assert paths == {
            "SANGAM_WORKER_ID": "metadata.uid",
            "SANGAM_WORKER_NAME": "metadata.name",
            "SANGAM_NODE_NAME": "spec.nodeName",
            "SANGAM_ADVERTISE_HOST": "status.podIP",
        }


def test_shared_memory_is_memory_and_weights_are_read_only(everything: Rendered) -> None:
    for each in everything.workers:
        volumes = {v["name"]: v for v in pod(each)["volumes"]}
        mounts = {m["mountPath"]: m for m in container(each)["volumeMounts"]}
        shm = volumes[mounts["/dev/shm"]["name"]]
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
        assert mounts["/models"]["readOnly"] is True
        assert volumes[mounts["/models"]["name"]]["persistentVolumeClaim"]["claimName"] == "weights"
        assert "readOnly" not in mounts["/cache"]
        assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "cache"}
        assert environment(each)["HF_HOME"].startswith("/cache")
        assert environment(each)["HF_TOKEN"] == {
            "secretKeyRef": {"name": "hugging-face", "key": "token"}
        }


def test_nccl_has_its_own_variables(helm: Helm) -> None:
    rendered = helm.render(
        {
            "workers": {
                "defaults": {"ncclEnv": {"NCCL_SOCKET_IFNAME": "bond0", "NCCL_IB_HCA": "mlx5"}}
            }
        }
    )
    for each in rendered.workers:
        assert environment(each)["NCCL_SOCKET_IFNAME"] == "bond0"
        assert environment(each)["NCCL_IB_HCA"] == "mlx5"


def test_selectors_and_pods_do_not_know_the_charts_version(helm: Helm, tmp_path: Path) -> None:
    newer = tmp_path / "sangam"
    shutil.copytree(CHART, newer)
    meta = yaml.safe_load((newer / "Chart.yaml").read_text("utf-8"))
    meta["version"] = "9.9.9"
    (newer / "Chart.yaml").write_text(yaml.safe_dump(meta), encoding="utf-8")
    secrets = {
        "auth": {"redis": {"existingSecret": "a"}, "internalToken": {"existingSecret": "b"}},
    }
    before, after = helm.render(secrets), helm.render(secrets, chart=newer)
    for kind in ("StatefulSet", "Deployment"):
        for old, new in zip(before.of(kind), after.of(kind), strict=True):
            assert old["spec"] == new["spec"], "a new chart would restart every pod"
            assert new["metadata"]["labels"]["helm.sh/chart"] == "sangam-9.9.9"


def test_selectors_are_the_frozen_ones(everything: Rendered) -> None:
    for each in everything.of("StatefulSet", "Deployment"):
        expected = {
            "app.kubernetes.io/name": "sangam",
            "app.kubernetes.io/instance": "sangam",
            "app.kubernetes.io/component": component(each),
        }
        if component(each) == "worker":
            name = each["metadata"]["name"].removeprefix("sangam-")
            expected["sangam.io/boot-role"] = name
        assert each["spec"]["selector"]["matchLabels"] == expected
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert expected.items() <= labels.items()


def test_everything_an_operator_may_add_arrives(everything: Rendered) -> None:
    assert EVERYTHING["workers"]["defaults"]["priorityClassName"] == "high"
    for each in everything.workers:
        metadata = each["spec"]["template"]["metadata"]
        assert metadata["annotations"]["example.com/a"] == "1"
        assert metadata["labels"]["example.com/b"] == "2"
        assert pod(each)["priorityClassName"] == "high"
        assert pod(each)["runtimeClassName"] == "nvidia"
        assert pod(each)["nodeSelector"] == {"pool": "gpu"}
        assert pod(each)["imagePullSecrets"] == [{"name": "registry"}]
        assert pod(each)["topologySpreadConstraints"]
        assert environment(each)["OMP_NUM_THREADS"] == "1"
