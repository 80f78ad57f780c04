"""Groups of options become options of a command, and what was asked for comes back as the group."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from sangam_core.errors import ConfigurationError
from sangam_loadtest.arrivals import ArrivalProcess
from sangam_loadtest.load import planned
from sangam_loadtest.options import LoadOptions, ServerOptions
from sangam_loadtest.spread_options import spread_options


@dataclass(frozen=True)
class Fruit:
    apples: Annotated[int, typer.Option(help="How many apples.", min=0)] = 1
    pears: Annotated[list[int] | None, typer.Option("--pear")] = None


@dataclass(frozen=True)
class Basket:
    has_lid: Annotated[bool, typer.Option("--lid")] = False


def invoked(*arguments: str) -> str:
    app = typer.Typer()

    @app.command()
    @spread_options
    def pack(
        owner: Annotated[str, typer.Option()],
        fruit: Fruit = Fruit(apples=3),
        basket: Basket = Basket(),
        note: Annotated[str | None, typer.Option()] = None,
    ) -> None:
        """Pack a basket."""
        typer.echo(f"{owner} {fruit} {basket} {note}")

    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    return result.output.strip()


def test_a_group_s_defaults_are_the_command_s_own() -> None:
    assert invoked("--owner", "me") == ("me Fruit(apples=3, pears=None) Basket(has_lid=False) None")


def test_what_is_asked_for_comes_back_as_the_group() -> None:
    told = invoked(
        *("--owner", "me", "--apples", "7", "--pear", "1", "--pear", "2", "--lid", "--note", "x")
    )
    assert told == "me Fruit(apples=7, pears=[1, 2]) Basket(has_lid=True) x"


def test_a_group_s_help_and_checks_are_the_command_s() -> None:
    assert "How many apples." in invoked("--help")
    assert "Pack a basket." in invoked("--help")
    assert "Invalid value" in invoked("--owner", "me", "--apples", "-1")
    assert "Missing option" in invoked()


def test_two_options_of_one_name_are_refused() -> None:
    def twice(
        apples: int = 0,
        fruit: Fruit = Fruit(),
    ) -> None:
        """Never called."""

    with pytest.raises(ValueError, match="duplicate parameter name: 'apples'"):
        spread_options(twice)


def test_a_load_needs_no_server() -> None:
    plan = planned(LoadOptions(trace="arxiv", requests=3, warmup=2.0, seed=4).load(2.0))
    assert sum(not due.is_warmup for due in plan) >= 1
    assert len(plan) == 3 + 4
    assert plan == planned(LoadOptions(trace="arxiv", requests=3, warmup=2.0, seed=4).load(2.0))


def test_a_load_without_a_length_lasts_a_minute() -> None:
    load = LoadOptions(arrivals=ArrivalProcess.CONSTANT, trace="sharegpt").load(0.5)
    assert load.duration_seconds == 60.0
    assert len(planned(load)) == 30
    assert len(planned(load.at(1.0))) == 60


def test_a_load_without_a_rate_needs_a_trace_s_own_times() -> None:
    with pytest.raises(ConfigurationError, match="need a rate"):
        LoadOptions(trace="sharegpt").load(None)


def test_what_was_asked_for_is_told_flat_and_without_the_key() -> None:
    """The state of a search for capacity, and summaries, were written so from the first."""
    load = LoadOptions(trace="sharegpt", requests=5).load(1.0)
    asked = ServerOptions(api_key="secret", model="m").run_options(load).asked()
    assert sorted(asked) == [
        "arrivals",
        "duration_seconds",
        "extra",
        "has_timings",
        "model",
        "num_requests",
        "target",
        "trace",
        "warmup_seconds",
    ]
    assert asked["target"] == {"urls": ("http://127.0.0.1:8000",), "timeout_seconds": 600.0}
    assert asked["arrivals"]["rate"] == 1.0
