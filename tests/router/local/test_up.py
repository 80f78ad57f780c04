"""What ``sangam up`` checks before it starts anything, and how it tells of processes."""

import io

import pytest
from rich.console import Console

from sangam_core.errors import ConfigurationError
from sangam_router.local.processes import ProcessEvent, ProcessState
from sangam_router.local.up import Board, require_packages, told_overruled


def told(*events: ProcessEvent, is_terminal: bool = False) -> str:
    out = io.StringIO()
    with Board(Console(file=out, force_terminal=is_terminal, width=100)) as board:
        for event in events:
            board(event)
    return out.getvalue()


STARTING = ProcessEvent("worker-0", ProcessState.STARTING)
READY = ProcessEvent("worker-0", ProcessState.READY, seconds=7.14)
DIED = ProcessEvent("worker-0", ProcessState.RESTARTING, 0.25, "killed by SIGKILL")


def test_a_missing_package_is_named_with_what_to_install() -> None:
    with pytest.raises(ConfigurationError, match=r"no_such_package.*pip install '\.\[worker\]"):
        require_packages(("json", "no_such_package"))
    require_packages(("json",))


def test_without_a_terminal_every_change_is_a_plain_line() -> None:
    lines = told(STARTING, READY, DIED).splitlines()
    assert lines == [
        "worker-0: starting",
        "worker-0: ready after 7.1 s",
        "worker-0: restarting in 0.25 s: it has ended (killed by SIGKILL)",
    ]


def test_on_a_terminal_the_start_is_a_table() -> None:
    shown = told(STARTING, READY, is_terminal=True)
    assert "\x1b[" in shown
    assert "7.1 s" in shown


def test_when_stopping_the_end_of_a_process_is_no_news() -> None:
    out = io.StringIO()
    board = Board(Console(file=out))
    board.say_stopping()
    board(ProcessEvent("worker-0", ProcessState.STOPPED))
    assert out.getvalue() == "stopping ...\n"


def test_variables_that_do_nothing_here_are_told_with_the_options_that_do() -> None:
    assert told_overruled(["SANGAM_MODEL", "SANGAM_WORKER_ID"]) == (
        "not taken from the environment, as sangam up decides it: SANGAM_MODEL (say --model), "
        "SANGAM_WORKER_ID"
    )
