"""Records of ours and of libraries leave as one line each, in the form that was asked for."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from sangam_core.logs import configure_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Logging belongs to the process: leave it as it was."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    handlers, level, quiet = list(root.handlers), root.level, uvicorn.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)
    uvicorn.setLevel(quiet)


def test_a_record_is_one_json_object_with_what_every_record_carries(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("info", "json", router_id="r-0")
    structlog.get_logger("ours").info("serving", port=8000)
    logging.getLogger("theirs").warning("%s is odd", "this")
    ours, theirs = map(json.loads, capsys.readouterr().err.splitlines())
    assert (ours["event"], ours["port"], ours["level"]) == ("serving", 8000, "info")
    assert (theirs["event"], theirs["logger"]) == ("this is odd", "theirs")
    assert ours["router_id"] == theirs["router_id"] == "r-0"
    assert ours["timestamp"].endswith("Z")


def test_a_records_own_field_wins_over_what_every_record_carries(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("info", "json", worker_id="mine")
    structlog.get_logger("ours").info("gone", worker_id="another")
    assert json.loads(capsys.readouterr().err)["worker_id"] == "another"


def test_less_severe_records_and_what_servers_say_of_themselves_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("info", "json")
    structlog.get_logger("ours").debug("detail")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.access").info("GET / 200")
    assert capsys.readouterr().err == ""


def test_a_traceback_for_people_shows_no_local_variables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("info", "console")
    password = "sesame"
    try:
        raise ValueError(f"{len(password)} letters")
    except ValueError:
        structlog.get_logger("ours").exception("failed")
    shown = capsys.readouterr().err
    assert "ValueError: 6 letters" in shown
    assert "sesame" not in shown.replace('password = "sesame"', "")
