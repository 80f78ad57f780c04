"""Every pair of the lifecycle table, what ``advance`` counts, and that nobody else moves a phase.

``EXPECTED`` is written out by hand, so that the table and this reading of the design check each
other.
"""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sangam_core
from sangam_core.errors import IllegalTransition
from sangam_core.geometry import Geometry
from sangam_core.lifecycle import TRANSITIONS, Command, Event, Phase, Request, advance

SERVICES = Path(sangam_core.__file__).parents[2]
REPOSITORY = SERVICES.parent

EXPECTED = {
    Phase.WAITING: {
        Event.PREFILL_PLACED: (Phase.PREFILLING, Command.START_PREFILL),
        Event.CANCEL: (Phase.CANCELLED, Command.DISCARD),
        Event.GIVE_UP: (Phase.FAILED, Command.FAIL),
    },
    Phase.PREFILLING: {
        Event.PREFILLED_IN_PLACE: (Phase.DECODING, Command.FOLLOW_DECODE),
        Event.PREFILLED_FOR_TRANSFER: (Phase.PREFILLED, Command.PLACE_DECODE),
        Event.PLACE_REFUSED: (Phase.WAITING, Command.PLACE_PREFILL),
        Event.BLOCK_COMPLETE: (Phase.WAITING, Command.PLACE_PREFILL),
        Event.ANSWER_COMPLETE: (Phase.FINISHED, Command.FINISH),
        Event.BLOCK_LOST: (Phase.WAITING, Command.PLACE_PREFILL),
        Event.CANCEL: (Phase.CANCELLED, Command.DISCARD),
        Event.GIVE_UP: (Phase.FAILED, Command.FAIL),
    },
    Phase.PREFILLED: {
        Event.DECODE_PLACED: (Phase.TRANSFERRING, Command.START_TRANSFER),
        Event.BLOCK_LOST: (Phase.WAITING, Command.PLACE_PREFILL),
        Event.CANCEL: (Phase.CANCELLED, Command.DISCARD),
        Event.GIVE_UP: (Phase.FAILED, Command.FAIL),
    },
    Phase.TRANSFERRING: {
        Event.KV_ARRIVED: (Phase.DECODING, Command.FOLLOW_DECODE),
        Event.PLACE_REFUSED: (Phase.PREFILLED, Command.PLACE_DECODE),
        Event.BLOCK_LOST: (Phase.WAITING, Command.PLACE_PREFILL),
        Event.CANCEL: (Phase.CANCELLED, Command.DISCARD),
        Event.GIVE_UP: (Phase.FAILED, Command.FAIL),
    },
    Phase.DECODING: {
        Event.BLOCK_COMPLETE: (Phase.WAITING, Command.PLACE_PREFILL),
        Event.ANSWER_COMPLETE: (Phase.FINISHED, Command.FINISH),
        Event.BLOCK_LOST: (Phase.WAITING, Command.PLACE_PREFILL),
        Event.CANCEL: (Phase.CANCELLED, Command.DISCARD),
        Event.GIVE_UP: (Phase.FAILED, Command.FAIL),
    },
    Phase.FINISHED: {},
    Phase.FAILED: {},
    Phase.CANCELLED: {},
}
WAY_TO = {
    Phase.WAITING: [],
    Phase.PREFILLING: [Event.PREFILL_PLACED],
    Phase.PREFILLED: [Event.PREFILL_PLACED, Event.PREFILLED_FOR_TRANSFER],
    Phase.TRANSFERRING: [
        Event.PREFILL_PLACED,
        Event.PREFILLED_FOR_TRANSFER,
        Event.DECODE_PLACED,
    ],
    Phase.DECODING: [Event.PREFILL_PLACED, Event.PREFILLED_IN_PLACE],
    Phase.FINISHED: [Event.PREFILL_PLACED, Event.ANSWER_COMPLETE],
    Phase.FAILED: [Event.GIVE_UP],
    Phase.CANCELLED: [Event.CANCEL],
}
PAIRS = [(phase, event) for phase in Phase for event in Event]


def request(num_blocks: int = 2, *events: Event) -> Request:
    made = Request("r", arrival_seconds=1.0, geometry=Geometry(10, num_blocks))
    for event in events:
        advance(made, event)
    return made


def snapshot(made: Request) -> tuple[object, ...]:
    return (made.phase, made.block, made.attempt, made.num_lost, made.order, made.geometry)


# -- the table -------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "event"), PAIRS)
def test_every_pair_moves_as_the_design_says_or_raises(phase: Phase, event: Event) -> None:
    made = request(2, *WAY_TO[phase])
    assert made.phase is phase
    if event in EXPECTED[phase]:
        next_phase, command = EXPECTED[phase][event]
        assert advance(made, event) is command
        assert made.phase is next_phase
        return
    before = snapshot(made)
    with pytest.raises(IllegalTransition, match=f"request r: {event} cannot happen while {phase}"):
        advance(made, event)
    assert snapshot(made) == before


def test_the_table_holds_these_pairs_and_no_other() -> None:
    assert {
        (phase, event): moved for phase, row in EXPECTED.items() for event, moved in row.items()
    } == TRANSITIONS


def test_a_request_starts_in_waiting_and_cannot_be_made_in_another_phase() -> None:
    assert request().phase is Phase.WAITING
    with pytest.raises(TypeError):
        Request("r", 1.0, Geometry(10, 1), _phase=Phase.DECODING)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        request().phase = Phase.DECODING  # type: ignore[misc]


def test_nothing_happens_after_the_end() -> None:
    assert {phase for phase in Phase if phase.is_final} == {
        phase for phase, row in EXPECTED.items() if not row
    }


# -- what is counted -------------------------------------------------------------------------


def test_the_last_block_finishes_the_request() -> None:
    made = request(1, Event.PREFILL_PLACED, Event.PREFILLED_IN_PLACE)
    assert advance(made, Event.BLOCK_COMPLETE) is Command.FINISH
    assert (made.phase, made.block) == (Phase.FINISHED, 0)


def test_a_prefill_that_completes_the_last_block_finishes_the_request() -> None:
    made = request(1, Event.PREFILL_PLACED)
    assert advance(made, Event.BLOCK_COMPLETE) is Command.FINISH
    assert made.phase is Phase.FINISHED


def test_each_placement_of_a_block_has_its_own_attempt() -> None:
    made = request(2)
    seen = []
    for ending in (Event.PLACE_REFUSED, Event.BLOCK_LOST, Event.BLOCK_COMPLETE):
        advance(made, Event.PREFILL_PLACED)
        seen.append((made.block, made.attempt))
        advance(made, ending)
    advance(made, Event.PREFILL_PLACED)
    seen.append((made.block, made.attempt))
    assert seen == [(0, 1), (0, 2), (0, 3), (1, 1)]


def test_losses_are_counted_over_the_whole_life_and_refusals_are_not_losses() -> None:
    made = request(2)
    for ending in (Event.BLOCK_LOST, Event.PLACE_REFUSED, Event.BLOCK_COMPLETE, Event.BLOCK_LOST):
        advance(made, Event.PREFILL_PLACED)
        advance(made, ending)
    assert made.num_lost == 2


def test_a_request_keeps_its_place_in_every_queue() -> None:
    made = request(2)
    before = made.order
    advance(made, Event.PREFILL_PLACED)
    advance(made, Event.BLOCK_COMPLETE)
    assert made.order == before == (1.0, "r")


@given(st.lists(st.sampled_from(Event), max_size=60), st.integers(1, 4))
def test_no_run_of_events_repeats_a_placement_or_goes_back_a_block(
    events: list[Event], num_blocks: int
) -> None:
    made = request(num_blocks)
    placements = []
    block = 0
    for event in events:
        try:
            command = advance(made, event)
        except IllegalTransition:
            continue
        if command is Command.START_PREFILL:
            placements.append((made.block, made.attempt))
        assert block <= made.block <= min(block + 1, num_blocks - 1)
        block = made.block
        assert made.phase.is_final == (command in (Command.FINISH, Command.FAIL, Command.DISCARD))
    assert len(placements) == len(set(placements))


# -- the only writer -------------------------------------------------------------------------


def writes_of(name: str, source: str) -> list[int]:
    """Lines that set an attribute of this name: assignment, deletion, setattr, replace."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == name:
            if not isinstance(node.ctx, ast.Load):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call):
            named = node.func.attr if isinstance(node.func, ast.Attribute) else None
            named = node.func.id if isinstance(node.func, ast.Name) else named
            strings = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if named in ("setattr", "__setattr__", "delattr") and name in strings:
                lines.append(node.lineno)
            if any(keyword.arg == name for keyword in node.keywords):
                lines.append(node.lineno)
    return lines


def test_the_search_for_writers_sees_every_way_of_writing() -> None:
    ways = "r._phase = 1\nr._phase += 1\nsetattr(r, '_phase', 1)\nreplace(r, _phase=1)\nr._phase\n"
    assert writes_of("_phase", ways) == [1, 2, 3, 4]


def test_only_advance_writes_a_phase() -> None:
    writers = {}
    for path in [*SERVICES.rglob("*.py"), *(REPOSITORY / "loadtest").rglob("*.py")]:
        lines = writes_of("_phase", path.read_text(encoding="utf-8"))
        if lines:
            writers[path.relative_to(REPOSITORY).as_posix()] = lines
    home = "services/core/sangam_core/lifecycle.py"
    assert list(writers) == [home]
    tree = ast.parse((REPOSITORY / home).read_text(encoding="utf-8"))
    (function,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "advance"
    )
    assert function.end_lineno is not None
    assert all(function.lineno <= line <= function.end_lineno for line in writers[home])
