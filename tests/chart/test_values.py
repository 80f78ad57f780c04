"""values.yaml, its schema and the settings classes say the same, and good values pass."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.chart.helm import CHART, EVERYTHING, SCENARIOS, Helm

from sangam_core.settings import ServiceSettings
from sangam_router.local.settings_schema import CHART_SETS, camel_case, settings_schema
from sangam_router.settings import RouterSettings
from sangam_worker.settings import WorkerSettings

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text("utf-8"))
TEXT = (CHART / "values.yaml").read_text("utf-8")
VALUES: dict[str, Any] = yaml.safe_load(TEXT)
SETTINGS = {"routerSettings": RouterSettings, "workerSettings": WorkerSettings}
KUBERNETES_OWN = {
    "resources",
    "podSecurityContext",
    "securityContext",
    "startupProbe",
    "readinessProbe",
    "livenessProbe",
}
"""Maps of Kubernetes: its documentation explains their fields, a comment on the map says why."""


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.rsplit("/", 1)[1]] if reference else schema


def objects(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of a map, below `schema`."""
    if schema.get("type") == "object":
        yield path, schema
    inners = dict(schema.get("properties", {}))
    if "items" in schema:
        inners["[]"] = schema["items"]
    for name, inner in inners.items():
        yield from objects(inner, f"{path}.{name}")


def maps(values: dict[str, Any], schema: dict[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Every map in values.yaml whose keys the schema fixes."""
    schema = resolved(schema)
    if "properties" in schema:
        yield path
        for name, value in values.items():
            if isinstance(value, dict) and name in schema["properties"]:
                yield from maps(value, schema["properties"][name], (*path, name))


def with_typo(path: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(VALUES))
    inner = values
    for name in path:
        inner = inner[name]
    inner["tpyo"] = 1
    return values


@pytest.fixture(scope="module")
def validator() -> Any:
    return jsonschema.Draft7Validator(SCHEMA)


def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_every_map_of_the_schema_is_closed_or_says_what_its_keys_may_be() -> None:
    roots = {"values": SCHEMA} | SCHEMA["definitions"]
    open_maps = [
        path
        for name, root in roots.items()
        for path, schema in objects(root, name)
        if "additionalProperties" not in schema
    ]
    assert open_maps == ["values.global"]


@pytest.mark.parametrize(
    "path", list(maps(VALUES, SCHEMA)), ids=lambda path: ".".join(path) or "top"
)
def test_a_typo_is_refused_at_every_level(path: tuple[str, ...], validator: Any) -> None:
    errors = [error.message for error in validator.iter_errors(with_typo(path))]
    assert len(errors) == 1
    assert "'tpyo' was unexpected" in errors[0]


def test_defaults_and_scenarios_are_good_values(validator: Any) -> None:
    for values in (VALUES, EVERYTHING, *(yaml.safe_load(p.read_text("utf-8")) for p in SCENARIOS)):
        validator.validate(values)


def test_every_key_of_the_schema_has_a_default_in_values() -> None:
    def missing(values: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
        for name, inner in resolved(schema).get("properties", {}).items():
            where = f"{path}.{name}"
            if name not in values:
                yield where
            elif isinstance(values[name], dict) and values[name] and name not in KUBERNETES_OWN:
                yield from missing(values[name], inner, where)

    found = set(missing(VALUES, SCHEMA, ""))
    assert found == {".global"}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_schema_of_settings_is_that_of_the_settings_class(name: str) -> None:
    kind: type[ServiceSettings] = SETTINGS[name]
    assert SCHEMA["definitions"][name] == settings_schema(kind), "run `make chart-schema`"
    in_schema = set(SCHEMA["definitions"][name]["properties"])
    in_class = {camel_case(field) for field in kind.model_fields if field not in CHART_SETS}
    assert in_schema == in_class


def test_what_the_chart_sets_itself_is_a_setting() -> None:
    fields = {field for kind in SETTINGS.values() for field in kind.model_fields}
    assert sorted(CHART_SETS - fields) == []


def test_every_value_has_a_comment() -> None:
    lines = TEXT.splitlines()

    def has_comment(node: yaml.Node) -> bool:
        line = node.start_mark.line
        return line > 0 and lines[line - 1].lstrip().startswith("#")

    def bare(node: yaml.MappingNode, path: str, is_covered: bool) -> Iterator[str]:
        """Values with no comment on them or on the map that they stand in."""
        for key, value in node.value:
            where = f"{path}.{key.value}"
            is_said = has_comment(key)
            if isinstance(value, yaml.MappingNode) and value.value:
                is_kubernetes = key.value in KUBERNETES_OWN
                yield from bare(value, where, is_said or (is_covered and not is_kubernetes))
            elif not (is_said or is_covered):
                yield where

    root = yaml.compose(TEXT)
    assert isinstance(root, yaml.MappingNode)
    assert list(bare(root, "", is_covered=False)) == []


def test_a_long_number_stays_what_it_is(helm: Helm) -> None:
    rendered = helm.render(
        None, "router.settings.maxBodyBytes=123456789", "theta=2500000", "prefill=2"
    )
    assert "123456789" in json.dumps(rendered.objects)
    assert not re.search(r"\d\.\d+e\+\d", json.dumps(rendered.objects))


@pytest.mark.parametrize("values", [None, *SCENARIOS], ids=lambda v: v.stem if v else "default")
def test_lint_has_nothing_to_say(helm: Helm, values: Path | None) -> None:
    done = helm.run("lint", "--strict", str(CHART), *(["-f", str(values)] if values else []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout
