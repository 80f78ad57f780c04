"""What a recommendation says to deploy exists: in the chart's schema, and as options of ``up``."""

import inspect
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.loadtest.recommend.builders import candidate

from sangam_loadtest.recommend.candidates import Candidate
from sangam_loadtest.recommend.deploy import helm_command, helm_values, local_command
from sangam_router.local.cli import up_command
from sangam_router.settings import RouterSettings
from sangam_worker.settings import WorkerSettings

CHART = Path(__file__).parents[3] / "charts" / "sangam"
CANDIDATES = [
    candidate("8C", tau=4096, placement="decode_aware"),
    candidate("5P3D", tau_prefill=2048),
    candidate("5P3C", tau=2048, theta=8192.0),
    candidate(
        "5P3C",
        theta=math.inf,
        placement="shortest_delay",
        max_blocks=40.0,
        admission="adaptive",
        mask_buffer=1024,
    ),
    candidate("3P3C2D"),
]


def chart_values(chosen: Candidate, model: str) -> dict[str, Any]:
    """The chart's values with the recommended ones, read as ``helm --set`` reads them."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    for name, text in helm_values(chosen, model).items():
        *path, last = name.split(".")
        there = values
        for part in path:
            there = there.setdefault(part, {})
        there[last] = yaml.safe_load(text)
    return values


@pytest.mark.parametrize("chosen", CANDIDATES, ids=str)
def test_the_chart_takes_the_values(chosen: Candidate) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = chart_values(chosen, "llada-8b")
    jsonschema.validate(values, schema)
    assert values["prefill"] + values["colocated"] + values["decode"] == 8
    assert values["model"]["name"] == "GSAI-ML/LLaDA-8B-Instruct"
    # What _validate.tpl refuses: a threshold without prefill workers or without overflow.
    if values["theta"] is not None:
        assert values["prefill"]
        assert values["overflow"]


def test_the_values_say_what_was_chosen() -> None:
    chosen = candidate("5P3C", tau=2048, tau_prefill=2048, theta=16384.0, max_blocks=32.0)
    assert helm_command(chosen, "small") == (
        "helm install sangam charts/sangam --set prefill=5,colocated=3,decode=0,"
        "tau.prefill=2048,tau.colocated=2048,theta=16384,router.settings.maxBlocksPerDecoder=32"
    )
    assert helm_values(candidate("5P3D"), "small")["overflow"] == "false"
    assert helm_values(candidate("8C"), "/models/my-LLaDA/")["model.servedName"] == "my-llada"


@pytest.mark.parametrize("chosen", CANDIDATES, ids=str)
def test_the_local_command_has_options_and_settings_that_exist(chosen: Candidate) -> None:
    words = local_command(chosen).split()
    environment, called = words[: words.index("sangam")], words[words.index("sangam") + 2 :]
    settings = {*RouterSettings.model_fields, *WorkerSettings.model_fields}
    for setting in environment:
        assert setting.partition("=")[0].removeprefix("SANGAM_").lower() in settings
    options = {name.removeprefix("--") for name in called if name.startswith("--")}
    known = {name.replace("_", "-") for name in inspect.signature(up_command).parameters}
    assert {option.removeprefix("no-") for option in options} <= known
