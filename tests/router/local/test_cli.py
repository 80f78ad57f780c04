"""The ``sangam`` command: errors in one line, and commands of other packages."""

import importlib.metadata
import sys
import types
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from sangam_router.local.cli import add_commands, app
from sangam_router.local.cluster import ClusterOptions

RUNNER = CliRunner()


def entry_point(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, "sangam.commands")


def test_a_mix_of_roles_that_cannot_serve_ends_with_one_line_and_status_1() -> None:
    result = RUNNER.invoke(app, ["up", "--prefill", "2"])
    assert result.exit_code == 1
    assert result.output.startswith("error: prefill workers hand their blocks on")


@pytest.mark.parametrize("option", ["--prefill", "--decode", "--colocated"])
def test_a_negative_count_is_refused(option: str) -> None:
    assert RUNNER.invoke(app, ["up", option, "-1"]).exit_code == 2


def test_a_second_fleet_keeps_off_the_logs_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logs_of_up(monkeypatch) == Path(".sangam/logs")
    assert logs_of_up(monkeypatch, "--port", "8100") == Path(".sangam/logs/8100")


def test_a_log_folder_that_is_named_is_taken_on_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logs_of_up(monkeypatch, "--port", "8100", "--log-dir", "here") == Path("here")


def logs_of_up(monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    """The folder that the command hands to the cluster, which is not started."""
    given: list[ClusterOptions] = []

    async def up(options: ClusterOptions, console: Console) -> None:
        given.append(options)

    monkeypatch.setattr("sangam_router.local.cli.up", up)
    assert RUNNER.invoke(app, ["up", *options]).exit_code == 0
    return given[0].log_dir


def test_chat_without_a_router_says_what_to_start() -> None:
    result = RUNNER.invoke(app, ["chat", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "no answer from http://127.0.0.1:9" in result.output
    assert "sangam up" in result.output


def test_another_package_adds_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    other = typer.Typer()

    @other.callback(invoke_without_command=True)
    def tell() -> None:
        typer.echo("so many requests a second")

    module = types.ModuleType("load_test_of_a_test")
    module.app = other  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    target = typer.Typer()
    add_commands(target, [entry_point("loadtest", f"{module.__name__}:app")])
    assert "so many requests a second" in RUNNER.invoke(target, ["loadtest"]).output


def test_a_command_that_is_not_installed_says_so_only_when_called() -> None:
    target = typer.Typer()
    add_commands(target, [entry_point("loadtest", "no_such_package_at_all:app")])
    assert RUNNER.invoke(target, ["--help"]).exit_code == 0
    result = RUNNER.invoke(target, ["loadtest"])
    assert result.exit_code == 1
    assert "sangam loadtest cannot be loaded" in result.output
