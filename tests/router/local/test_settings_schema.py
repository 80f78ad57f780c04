"""The chart's schema of settings: which are in it, how their values read, the file it goes into."""

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from sangam_core.errors import ConfigurationError
from sangam_core.settings import ServiceSettings
from sangam_router.local.settings_schema import CHART_SETS, camel_case, main, settings_schema
from sangam_router.settings import RouterSettings
from sangam_worker.settings import WorkerSettings


class Colour(StrEnum):
    """An enumeration."""

    RED = "red"


class Example(ServiceSettings):
    """A tree with every kind of value."""

    model: str
    """The chart's own."""
    lease_seconds: Annotated[float, Field(gt=0)] = math.inf
    """Time,
    over two lines, of ``x``."""
    total_pages: Annotated[int, Field(ge=1)] | None = None
    """Pages."""
    log_level: Literal["info", "error"] = "info"
    """Level."""
    colour: Colour = Colour.RED
    """Colour."""
    is_open: bool = False
    """Whether."""


class Listing(ServiceSettings):
    """A tree that no map of plain values can hold."""

    names: tuple[str, ...] = ()
    """Names."""


THIS = f"{__name__}:Example"


def _properties() -> dict[str, Any]:
    properties = settings_schema(Example)["properties"]
    assert isinstance(properties, dict)
    return properties


def test_settings_read_in_camel_case_with_their_limits_and_meaning() -> None:
    assert _properties() == {
        "leaseSeconds": {
            "description": "Time, over two lines, of `x`.",
            "type": "number",
            "exclusiveMinimum": 0,
        },
        "totalPages": {"description": "Pages.", "type": "integer", "minimum": 1},
        "logLevel": {"description": "Level.", "type": "string", "enum": ["info", "error"]},
        "colour": {"description": "Colour.", "type": "string", "enum": ["red"]},
        "isOpen": {"description": "Whether.", "type": "boolean"},
    }


def test_unknown_settings_are_refused() -> None:
    assert settings_schema(Example)["additionalProperties"] is False


def test_a_setting_that_is_no_plain_value_is_named() -> None:
    with pytest.raises(ConfigurationError, match="names: is no plain value"):
        settings_schema(Listing)


@pytest.mark.parametrize("kind", [RouterSettings, WorkerSettings])
def test_every_setting_is_in_the_map_or_the_charts_own(kind: type[ServiceSettings]) -> None:
    in_map = set(settings_schema(kind)["properties"])
    for name in kind.model_fields:
        assert (camel_case(name) in in_map) is (name not in CHART_SETS)


def test_the_charts_own_settings_exist() -> None:
    assert {*RouterSettings.model_fields, *WorkerSettings.model_fields} >= CHART_SETS


def test_the_command_replaces_a_definition_and_leaves_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"type": "object", "definitions": {"a": {}, "b": {"c": 1}}}))
    assert main([str(path), f"a={THIS}"]) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["definitions"]["a"] == settings_schema(Example)
    assert written["definitions"]["b"] == {"c": 1}
    assert main([str(path), "a=no_such_module:Settings"]) == 1
    assert "no_such_module" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), f"a={THIS}"]) == 1
    assert main([str(path)]) == 2
