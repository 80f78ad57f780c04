"""The two sides of the throughput benchmark do the same work, and count the same answers."""

from pathlib import Path

import pytest

from benchmarks.contenders import dense_model, plain_loop, through_engine
from benchmarks.workloads import BLOCK_LENGTH, Workload, workloads
from sangam_core.decoding import Decoding, EosRule, Unmasking, UnmaskingRule
from sangam_worker.engine_loading import load_engine

MODEL = str(Path(__file__).parents[1] / "golden" / "models" / "llada-tiny-a")
PROMPTS = [[33, 73, 171, 249, 127], [5, 6, 7], [200, 3, 3, 90], [12] * 9]
FIXED = Unmasking(rule=UnmaskingRule.FIXED, steps=8)


def a_workload(decoding: Decoding) -> Workload:
    return Workload("tiny", MODEL, PROMPTS, len(PROMPTS), 2, decoding, 1.0)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("unmasking", [FIXED, Unmasking()], ids=["fixed", "threshold"])
def test_both_sides_give_the_same_answers_in_as_many_passes(
    unmasking: Unmasking, concurrency: int
) -> None:
    workload = a_workload(Decoding(unmasking=unmasking, eos_rule=EosRule.IGNORE))
    plain, expected = plain_loop(dense_model(MODEL), workload, PROMPTS)
    engine = load_engine(MODEL, total_pages=20)
    seen, answers = through_engine(engine, workload, PROMPTS, concurrency)
    assert answers == expected
    assert seen.num_passes == plain.num_passes
    assert seen.num_tokens == plain.num_tokens == len(PROMPTS) * 2 * BLOCK_LENGTH
    if unmasking is FIXED and concurrency == 1:
        assert seen.num_iterations == seen.num_passes


def test_an_answer_is_counted_up_to_its_eos_on_both_sides() -> None:
    whole = a_workload(Decoding(unmasking=FIXED, eos_rule=EosRule.IGNORE))
    model, engine = dense_model(MODEL), load_engine(MODEL, total_pages=20)
    _, answers = plain_loop(model, whole, PROMPTS)
    eos = answers[0][10]
    ends = a_workload(Decoding(unmasking=FIXED, eos_ids=(eos,), eos_rule=EosRule.END))
    plain, expected = plain_loop(model, ends, PROMPTS)
    seen, found = through_engine(engine, ends, PROMPTS, 2)
    assert found == expected
    assert len(found[0]) <= 10
    assert eos not in found[0]
    assert seen.num_tokens == plain.num_tokens == sum(map(len, found))


def test_there_are_prompts_for_every_request_in_flight() -> None:
    for workload in workloads(concurrency=12):
        assert len(workload.prompts) >= 12
        assert 1 <= workload.num_alone <= len(workload.prompts)
    assert sum(workload.share for workload in workloads()) == pytest.approx(1.0)
