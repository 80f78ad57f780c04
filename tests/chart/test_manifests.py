"""The examples beside the chart fit it, and the rendered demo is what the chart renders."""

import subprocess
from pathlib import Path
from typing import Any

import yaml
from tests.chart.helm import REPOSITORY, Helm, Rendered, container, documents, environment

MANIFESTS = REPOSITORY / "manifests"
DEMO = documents((MANIFESTS / "demo-cpu.yaml").read_text("utf-8"))


def load(path: str) -> list[dict[str, Any]]:
    return documents((MANIFESTS / path).read_text("utf-8"))


def test_the_rendered_demo_is_up_to_date(helm: Helm) -> None:
    done = subprocess.run(
        ["make", "--silent", "demo-cpu", f"HELM={helm.program}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == (MANIFESTS / "demo-cpu.yaml").read_text("utf-8"), "run `make manifests`"


def test_the_demo_needs_nothing_that_it_does_not_bring() -> None:
    rendered = Rendered(DEMO)
    assert DEMO[0]["kind"] == "Namespace"
    assert {each["metadata"].get("namespace") for each in DEMO[1:]} == {DEMO[0]["metadata"]["name"]}
    secret = rendered.one("Secret", "sangam-demo")
    for each in rendered.of("StatefulSet", "Deployment"):
        for value in environment(each).values():
            if isinstance(value, dict) and "secretKeyRef" in value:
                reference = value["secretKeyRef"]
                assert reference["name"] == "sangam-demo"
                assert reference["key"] in secret["stringData"]
        assert "nvidia.com/gpu" not in container(each)["resources"].get("limits", {})
    assert rendered.of("PersistentVolumeClaim", "ClusterRole", "CustomResourceDefinition") == []


def test_the_demo_runs_the_images_that_its_head_builds() -> None:
    head = (MANIFESTS / "demo-cpu" / "header.yaml").read_text("utf-8")
    images = {container(each)["image"] for each in Rendered(DEMO).of("StatefulSet", "Deployment")}
    ours = {image for image in images if image.startswith("localhost/")}
    assert len(ours) == 2
    assert images - ours == {"docker.io/library/redis:7.2-alpine"}
    for image in ours:
        assert f"-t {image} ." in head


def test_the_example_pool_takes_the_charts_workers(helm: Helm, default: Rendered) -> None:
    pool, _ = load("gpu-node-pool/karpenter.yaml")
    template = pool["spec"]["template"]
    rendered = helm.render(MANIFESTS / "gpu-node-pool/values.yaml")
    counts = [each["spec"]["replicas"] for each in rendered.workers]
    assert sum(counts) == pool["spec"]["limits"]["nvidia.com/gpu"] == 8
    for each in (*rendered.workers, *default.workers):
        pod = each["spec"]["template"]["spec"]
        assert pod.get("nodeSelector", {}).items() <= template["metadata"]["labels"].items()
        for taint in template["spec"]["taints"]:
            assert any(
                toleration["key"] == taint["key"]
                and toleration["operator"] == "Exists"
                and toleration["effect"] == taint["effect"]
                for toleration in pod["tolerations"]
            )


def test_the_plain_prometheus_asks_where_the_chart_listens(default: Rendered) -> None:
    (config,) = load("prometheus/prometheus.yaml")
    routers, workers = config["scrape_configs"]
    service = default.one("Service", "sangam-router-internal")
    (port,) = service["spec"]["ports"]
    assert routers["relabel_configs"][0]["regex"] == f"{service['metadata']['name']};{port['name']}"
    (discovery,) = workers["http_sd_configs"]
    assert discovery["url"] == (
        f"http://sangam-router-internal.sangam.svc:{port['port']}/admin/prometheus-targets"
    )
    for each in (routers, workers):
        targets = {c.get("target_label") for c in each["relabel_configs"]}
        assert {"namespace", "release"} <= targets
    assert config["rule_files"] == [Path("alerts.yaml").name]


def test_every_manifest_is_named_in_the_readme() -> None:
    readme = (MANIFESTS / "README.md").read_text("utf-8")
    for path in MANIFESTS.rglob("*"):
        relative = path.relative_to(MANIFESTS)
        if path.is_file() and relative.name != "README.md":
            folder = f"`{relative.parts[0]}/`"
            assert f"`{relative}`" in readme or folder in readme, relative
    assert yaml.safe_load((MANIFESTS / "demo-cpu/values.yaml").read_text("utf-8"))
