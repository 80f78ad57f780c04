"""What crosses a process border comes back as it went, and nothing unknown comes with it."""

import json
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sangam_core.answer import Completion
from sangam_core.decoding import (
    STEPPED_RULES,
    Commit,
    Decoding,
    EosRule,
    Resume,
    Unmasking,
    UnmaskingRule,
    WireModel,
)
from sangam_core.geometry import Geometry
from sangam_core.placement import Role
from sangam_core.wire import (
    BLOCK_EVENT,
    BlockEvent,
    BlockKey,
    BlockStart,
    Completed,
    HeldBlock,
    HeldBlocks,
    KVArrived,
    KVSent,
    KVSource,
    LossReason,
    Lost,
    PassRan,
    Ping,
    Prefilled,
    Queued,
    Refusal,
    RoleChange,
    WireGeometry,
)

SECONDS = st.floats(0, 1e6)
IDS = st.text(max_size=12)
KEYS = st.builds(BlockKey, request_id=IDS, block=st.integers(0, 200), attempt=st.integers(0, 10**6))
COMMITS = st.builds(
    Commit,
    position=st.integers(0, 10**6),
    token=st.integers(0, 200_000),
    confidence=st.none() | st.floats(allow_nan=False),
)
COMMIT_TUPLES = st.lists(COMMITS, max_size=4).map(tuple)
UNMASKINGS = st.builds(
    Unmasking,
    rule=st.sampled_from(UnmaskingRule),
    threshold=st.floats(0, 1),
    steps=st.none() | st.integers(1, 65536),
    factor=st.floats(0.001, 1e6),
    alg_temp=st.none() | st.floats(0, 1e6),
    eps=st.floats(1e-6, 0.999),
)
DECODINGS = st.builds(
    Decoding,
    unmasking=UNMASKINGS,
    cache=st.sampled_from(["dual", "prefix", "none"]),
    temperature=st.floats(0, 100),
    top_p=st.floats(0.001, 1),
    top_k=st.integers(0, 1000),
    seed=st.integers(0, 2**63 - 1),
    eos_ids=st.lists(st.integers(0, 200_000), max_size=3).map(tuple),
    eos_rule=st.sampled_from(EosRule),
)
RESUMES = st.builds(
    Resume,
    step=st.integers(1, 64),
    initial_masks=st.integers(1, 64),
    commits=COMMIT_TUPLES,
    carry=st.floats(allow_nan=False, allow_infinity=False),
)
STARTS = st.builds(
    BlockStart,
    key=KEYS,
    worker_epoch=IDS,
    arrival_seconds=st.floats(0, 4e9),
    ids=st.lists(st.integers(0, 200_000), max_size=8).map(tuple),
    geometry=st.builds(
        WireGeometry,
        prompt_tokens=st.integers(0, 4096),
        num_blocks=st.integers(1, 64),
        block_length=st.integers(1, 64),
    ),
    decoding=DECODINGS,
    hands_over=st.booleans(),
    source=st.none() | st.builds(KVSource, worker_id=IDS, epoch=IDS, url=IDS),
    resume=st.none() | RESUMES,
    deadline_seconds=st.floats(0.001, 1e6),
)
REASONS = st.builds(
    LossReason,
    code=st.sampled_from(get_args(LossReason.model_fields["code"].annotation)),
    message=IDS,
)
EVENTS_BY_TYPE: dict[type[WireModel], st.SearchStrategy[BlockEvent]] = {
    Queued: st.just(Queued()),
    Prefilled: st.builds(Prefilled, queue_seconds=SECONDS, prefill_seconds=SECONDS),
    PassRan: st.builds(
        PassRan,
        step=st.integers(0, 64),
        commits=COMMIT_TUPLES,
        carry=st.floats(allow_nan=False),
        completion=st.sampled_from(Completion),
        queue_seconds=SECONDS,
        decode_seconds=SECONDS,
    ),
    KVArrived: st.builds(KVArrived, transfer_seconds=SECONDS, num_bytes=st.integers(0, 2**45)),
    KVSent: st.just(KVSent()),
    Completed: st.builds(Completed, num_passes=st.integers(0, 64)),
    Lost: st.builds(Lost, reason=REASONS),
    Ping: st.just(Ping()),
}
EVENTS = st.one_of(*EVENTS_BY_TYPE.values())
REFUSALS = st.builds(
    Refusal,
    code=st.sampled_from(get_args(Refusal.model_fields["code"].annotation)),
    message=IDS,
)
COUNTS = st.integers(0, 2**40)
HELD = st.builds(
    HeldBlocks,
    worker_id=IDS,
    epoch=IDS,
    role=st.sampled_from(Role),
    is_draining=st.booleans(),
    total_pages=COUNTS,
    free_pages=COUNTS,
    blocks=st.lists(
        st.builds(
            HeldBlock,
            key=KEYS,
            stage=IDS,
            num_pages=COUNTS,
            needed_pages=COUNTS,
            prefill_tokens=COUNTS,
        ),
        max_size=3,
    ).map(tuple),
)
MESSAGES = st.one_of(
    STARTS, EVENTS, REFUSALS, HELD, st.builds(RoleChange, role=st.sampled_from(Role))
)


def start(**fields: object) -> BlockStart:
    body = {
        "key": {"request_id": "r", "block": 0},
        "worker_epoch": "e",
        "arrival_seconds": 1.0,
        "ids": [1, 2],
        "geometry": {"prompt_tokens": 1, "num_blocks": 1, "block_length": 1},
        "decoding": {},
    }
    return BlockStart.model_validate({**body, **fields})


# -- there and back --------------------------------------------------------------------------


def test_every_event_is_drawn_below() -> None:
    union = get_args(get_args(BlockEvent)[0])
    assert set(union) == set(EVENTS_BY_TYPE)


@given(EVENTS)
def test_an_event_survives_its_line(event: BlockEvent) -> None:
    line = event.model_dump_json()
    assert "\n" not in line
    back = BLOCK_EVENT.validate_json(line)
    assert type(back) is type(event)
    assert back == event


@given(MESSAGES)
def test_a_message_survives_its_body(message: WireModel) -> None:
    assert type(message).model_validate_json(message.model_dump_json()) == message


@given(STARTS)
def test_what_is_left_out_when_unset_comes_back_as_the_default(body: BlockStart) -> None:
    short = body.model_dump_json(exclude_defaults=True)
    assert BlockStart.model_validate_json(short) == body


@pytest.mark.parametrize("confidence", [None, 0.0, 1.0, -3.5, 1e-300, math.inf, -math.inf])
def test_a_confidence_crosses_exactly(confidence: float | None) -> None:
    commit = Commit(position=1, token=2, confidence=confidence)
    assert Commit.model_validate_json(commit.model_dump_json()) == commit


@given(st.integers(0, 100), st.integers(1, 10), st.integers(1, 64))
def test_a_geometry_survives_the_wire(prompt: int, num_blocks: int, block_length: int) -> None:
    geometry = Geometry(prompt, num_blocks, block_length)
    assert WireGeometry.of(geometry).geometry() == geometry


def test_an_undefined_confidence_stays_undefined() -> None:
    commit = Commit(position=1, token=2, confidence=math.nan)
    back = Commit.model_validate_json(commit.model_dump_json())
    assert back.confidence is not None
    assert math.isnan(back.confidence)


# -- strictness ------------------------------------------------------------------------------


@given(MESSAGES)
def test_an_unknown_field_is_refused_by_name(message: WireModel) -> None:
    body = {**json.loads(message.model_dump_json()), "surprise": 1}
    with pytest.raises(ValidationError, match="surprise"):
        type(message).model_validate_json(json.dumps(body))


@pytest.mark.parametrize(
    "fields",
    [
        {"key": {"request_id": "r", "block": 0, "surprise": 1}},
        {"decoding": {"surprise": 1}},
        {"decoding": {"unmasking": {"surprise": 1}}},
        {"resume": {"step": 1, "initial_masks": 1, "surprise": 1}},
        {"source": {"worker_id": "w", "epoch": "e", "url": "u", "surprise": 1}},
    ],
)
def test_an_unknown_field_is_refused_at_every_depth(fields: dict[str, object]) -> None:
    start()
    with pytest.raises(ValidationError, match="surprise"):
        start(**fields)


@given(MESSAGES)
def test_a_message_cannot_be_changed(message: WireModel) -> None:
    for name in type(message).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(message, name, None)


@pytest.mark.parametrize("line", ['{"type": "surprise"}', "{}", "[]", "null", "", "{"])
def test_a_line_that_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValidationError):
        BLOCK_EVENT.validate_json(line)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"key": {"request_id": "r", "block": -1}}, "key.block"),
        ({"key": {"request_id": "r", "block": 0, "attempt": -1}}, "key.attempt"),
        ({"geometry": {"prompt_tokens": -1, "num_blocks": 1, "block_length": 1}}, "prompt_tokens"),
        ({"geometry": {"prompt_tokens": 1, "num_blocks": 0, "block_length": 1}}, "num_blocks"),
        ({"geometry": {"prompt_tokens": 1, "num_blocks": 1, "block_length": 0}}, "block_length"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"decoding": {"temperature": math.nan}}, "temperature"),
        ({"decoding": {"temperature": math.inf}}, "temperature"),
        ({"decoding": {"temperature": -0.1}}, "temperature"),
        ({"decoding": {"top_p": 0}}, "top_p"),
        ({"decoding": {"top_k": -1}}, "top_k"),
        ({"decoding": {"seed": 2**63}}, "seed"),
        ({"decoding": {"seed": -1}}, "seed"),
        ({"decoding": {"unmasking": {"rule": "surprise"}}}, "rule"),
        ({"decoding": {"unmasking": {"threshold": 1.5}}}, "threshold"),
        ({"decoding": {"unmasking": {"threshold": math.nan}}}, "threshold"),
        ({"decoding": {"unmasking": {"steps": 0}}}, "steps"),
        ({"decoding": {"unmasking": {"factor": 0}}}, "factor"),
        ({"decoding": {"unmasking": {"eps": 1}}}, "eps"),
        ({"resume": {"step": -1, "initial_masks": 1}}, "resume.step"),
        ({"resume": {"step": 1, "initial_masks": 0}}, "resume.initial_masks"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(fields: dict[str, object], where: str) -> None:
    with pytest.raises(ValidationError, match=where.replace(".", r"\.")):
        start(**fields)


def test_a_block_that_has_run_no_pass_has_no_commits() -> None:
    with pytest.raises(ValidationError, match=r"resume\.commits must be empty"):
        Resume(step=0, initial_masks=1, commits=(Commit(position=1, token=1),))


# -- names -----------------------------------------------------------------------------------


def test_a_key_reads_as_request_block_and_attempt() -> None:
    assert str(BlockKey(request_id="cmpl-1", block=2, attempt=3)) == "cmpl-1/2/3"


@given(KEYS, KEYS)
def test_two_keys_read_the_same_only_when_they_are_the_same(a: BlockKey, b: BlockKey) -> None:
    assert (str(a) == str(b)) == (a == b)
    assert (hash(a) == hash(b)) or a != b


def test_a_slash_in_a_request_id_does_not_make_two_keys_one() -> None:
    assert str(BlockKey(request_id="a/1", block=2)) != str(BlockKey(request_id="a", block=1))


def test_the_rules_with_a_schedule_are_these() -> None:
    assert set(UnmaskingRule) - STEPPED_RULES == {
        UnmaskingRule.THRESHOLD,
        UnmaskingRule.FACTOR,
        UnmaskingRule.CONFIDENCE_THRESHOLD,
    }
