"""The environment that the chart renders is one that the services start with."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chart.helm import CHART, EVERYTHING, SCENARIOS, Helm, Rendered, component, environment

from sangam_core.settings import ServiceSettings, read_settings, variables
from sangam_router.local.settings_schema import CHART_SETS, settings_schema
from sangam_router.settings import RouterSettings
from sangam_worker.settings import WorkerSettings

KINDS: dict[str, type[ServiceSettings]] = {"router": RouterSettings, "worker": WorkerSettings}
FROM_ELSEWHERE = {
    "metadata.uid": "1b4e28ba-2fa1-11d2-883f-0016d3cca427",
    "metadata.name": "sangam-prefill-0",
    "spec.nodeName": "node-1",
    "status.podIP": "10.0.0.7",
}


def services(rendered: Rendered) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in rendered.of("Deployment", "StatefulSet"):
        if component(each) in KINDS:
            yield component(each), environment(each)


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if "fieldRef" in value:
        return FROM_ELSEWHERE[value["fieldRef"]["fieldPath"]]
    return "some-secret"


def started(
    kind: str, variables_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> ServiceSettings:
    """The settings that a container with these variables would read."""
    with monkeypatch.context() as patch:
        for variable in variables(KINDS[kind]):
            patch.delenv(variable.name, raising=False)
        for name, value in variables_.items():
            patch.setenv(name, text_of(value))
        return read_settings(KINDS[kind])


@pytest.mark.parametrize(
    "values",
    [None, EVERYTHING, *SCENARIOS],
    ids=["default", "everything", *(p.stem for p in SCENARIOS)],
)
def test_services_start_with_what_is_rendered(
    helm: Helm, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(services(helm.render(values)))
    assert [kind for kind, _ in found].count("worker") == 3
    for kind, env in found:
        known = {variable.name for variable in variables(KINDS[kind])}
        named = {name for name in env if name.startswith("SANGAM_")}
        assert named - known == set()
        started(kind, env, monkeypatch)


def sample(schema: dict[str, Any]) -> Any:
    """A value that the schema allows."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "boolean":
        return True
    if schema["type"] == "string":
        return next(text for text in ("text", "cpu") if re.search(schema.get("pattern", ""), text))
    if "exclusiveMaximum" in schema:
        return schema["exclusiveMaximum"] / 2
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    value = max(least, min(2, schema.get("maximum", 2)))
    return int(value) if schema["type"] == "integer" else float(value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_can_be_set_and_arrives_under_its_name(helm: Helm, kind: str) -> None:
    schema = settings_schema(KINDS[kind])["properties"]
    settings = {name: sample(one) for name, one in schema.items()}
    # Two of a pair that exclude each other, deadlines that others must hold.
    settings.pop("poolBytes", None)
    if kind == "router":
        settings["fixedMaskBufferTokens"] = 64
        values: dict[str, Any] = {"router": {"settings": settings}}
    else:
        settings["leaseSeconds"] = 20
        values = {"workers": {"defaults": {"settings": settings}}}
    names = {f"SANGAM_{field.upper()}" for field in KINDS[kind].model_fields}
    expected = names - {f"SANGAM_{name.upper()}" for name in CHART_SETS} - {"SANGAM_POOL_BYTES"}
    for found, env in services(helm.render(values)):
        if found == kind:
            assert expected - set(env) == set()
            assert {name for name in env if name.startswith("SANGAM_")} <= names


def test_values_reach_the_settings(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = helm.render(
        {
            "prefill": 2,
            "theta": 2500000,
            "tau": {"prefill": 16384, "decode": 512, "colocated": 2048},
            "model": {"servedName": "mine", "blockLength": 64},
            "workers": {"decode": {"settings": {"leaseSeconds": 8.5}, "drainDeadlineSeconds": 45}},
            "router": {"settings": {"maxBodyBytes": 123456789}},
        }
    )
    read = {
        env["SANGAM_ROLE"] if kind == "worker" else kind: started(kind, env, monkeypatch)
        for kind, env in services(rendered)
    }
    router, decode, prefill = read["router"], read["decode"], read["prefill"]
    assert isinstance(router, RouterSettings)
    assert isinstance(decode, WorkerSettings)
    assert isinstance(prefill, WorkerSettings)
    assert router.theta_tokens == 2500000
    assert router.served_model_name == "mine"
    assert router.max_body_bytes == 123456789
    # Routers must know the longest lease.
    assert router.worker_lease_seconds == decode.lease_seconds == 8.5
    assert prefill.lease_seconds == 5
    assert (decode.tau_tokens_prefill, decode.tau_tokens_decode) == (16384, 512)
    assert (decode.drain_deadline_seconds, prefill.drain_deadline_seconds) == (45, 30)
    assert router.block_length == decode.block_length == 64
    assert router.redis_url == decode.redis_url
    assert router.redis_namespace == decode.redis_namespace == "sangam"


def test_releases_that_share_a_redis_keep_apart(helm: Helm) -> None:
    scenario: Path = CHART / "ci/disaggregated-values.yaml"
    names = set()
    for release in ("one", "two"):
        for _, env in services(helm.render(scenario, release=release)):
            names.add(env["SANGAM_REDIS_NAMESPACE"])
    assert names == {"serving.one-sangam", "serving.two-sangam"}
