"""What is rendered is valid, field by field, for the API servers of the three newest minors."""

import functools
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kubernetes_validate import utils
from referencing import Registry, Resource
from tests.chart.helm import EVERYTHING, REPOSITORY, SCENARIOS, Helm, documents

VERSIONS = utils.all_versions()[-3:]
FOREIGN = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("monitoring.coreos.com/v1alpha1", "ScrapeConfig"),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"),
}
"""Kinds that are not Kubernetes' own; test_monitoring and test_edge look at them."""


@functools.cache
def definitions(version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    return Resource.from_contents(utils.schema_contents(f"{folder}/_definitions.json", version))


@functools.cache
def validator(version: str, api_version: str, kind: str) -> Any:
    """The strict schema (no unknown field) of a kind; kept, since reading it takes long."""
    group, _, rest = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.split(".")[0], rest)))
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    schema = utils.schema_contents(f"{folder}/{name}.json", version)
    registry: Registry[Any] = definitions(version) @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def problems(version: str, objects: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['kind']} {each['metadata']['name']}: {error.json_path}: {error.message}"
        for each in objects
        if (each["apiVersion"], each["kind"]) not in FOREIGN
        for error in validator(version, each["apiVersion"], each["kind"]).iter_errors(each)
    ]


def test_there_are_three_versions_and_they_are_new() -> None:
    assert len(VERSIONS) == 3
    assert [tuple(map(int, v.split(".")[:2])) for v in VERSIONS] >= [(1, 35), (1, 36), (1, 37)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_is_valid(helm: Helm, values: Path, version: str) -> None:
    assert problems(version, helm.render(values).objects) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [None, EVERYTHING], ids=["default", "everything"])
def test_the_defaults_and_all_options_are_valid(
    helm: Helm, values: dict[str, Any] | None, version: str
) -> None:
    assert problems(version, helm.render(values).objects) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_the_rendered_demo_is_valid(version: str) -> None:
    demo = documents((REPOSITORY / "manifests/demo-cpu.yaml").read_text("utf-8"))
    assert len(demo) > 10
    assert problems(version, demo) == []


def test_the_validation_sees_an_unknown_field_deep_inside() -> None:
    (demo, *_) = [
        each
        for each in documents((REPOSITORY / "manifests/demo-cpu.yaml").read_text("utf-8"))
        if each["kind"] == "StatefulSet"
    ]
    demo["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["execc"] = {}
    (found,) = problems(VERSIONS[-1], [demo])
    assert "execc" in found
