"""The host's gap is measured on whole iterations: every stage takes time, the table names it."""

import gc
import sys
from collections.abc import Iterator

import pytest

from benchmarks import host_gap
from benchmarks.host_gap import BESIDE_STAGES, GAP_STAGES, PACK
from benchmarks.host_stub import Case, Host, MadeUp
from sangam_worker.packing import rows_that_predict


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()


@pytest.mark.parametrize("case", Case)
def test_every_stage_is_timed(case: Case) -> None:
    stages = host_gap.stage_microseconds(num_blocks=3, num_iterations=12, case=case)
    assert set(stages) == {*GAP_STAGES, *BESIDE_STAGES, PACK}
    assert all(value > 0 for value in stages.values())


def test_blocks_that_began_together_stay_together_until_the_first_one_ends() -> None:
    few, many = (host_gap.foreseen(each, 60, Case.LOCKSTEP) for each in (2, 32))
    assert few.same > many.same > 0
    assert few.more == many.more == 0.0, "another one comes only where one has ended"


def test_a_prefill_that_the_budget_lets_in_later_is_one_more_where_none_has_ended() -> None:
    assert host_gap.foreseen(8, 100, Case.COLOCATED).more > 0


@pytest.mark.parametrize("is_spun", [False, True])
@pytest.mark.parametrize("case", Case)
def test_the_loop_s_gap_is_measured_with_either_wait(case: Case, is_spun: bool) -> None:
    gap = host_gap.gap_microseconds(2, 12, 0.001, case, is_spun=is_spun)
    assert 0 < gap.median <= gap.p99
    assert gap.busy > 0


@pytest.mark.parametrize(
    ("case", "expected"), [(Case.LOCKSTEP, {1}), (Case.DECODE, {1}), (Case.COLOCATED, {0, 1})]
)
def test_a_case_s_blocks_begin_where_it_says(case: Case, expected: set[int]) -> None:
    blocks = Host.build(4, case).blocks
    some = [blocks.next() for _ in range(20)]
    assert {state.step for state in some} == expected
    assert (len({len(state.ids) for state in some}) > 1) == (case is not Case.LOCKSTEP)


def test_a_tenth_of_the_candidates_is_confident_and_some_commit_in_every_pass() -> None:
    host = Host.build(num_blocks=2)
    for _ in range(2):
        state = host.blocks.next()
        assert host.scheduler.reserve(state)
        host.scheduler.arrived(state.key)
    plan = host.scheduler.next_plan()
    assert plan is not None
    outcomes = host.proposals(plan).outcomes()
    assert all(outcome.commits and outcome.error is None for outcome in outcomes)
    figures = MadeUp(1000)(host.logits.new_empty((50_000, 1)), 999, 2)
    assert (figures[:, 1] >= 0.9).double().mean().item() == pytest.approx(0.1, abs=0.01)
    assert len(rows_that_predict(plan.passes, "llada")) == 2 * 32


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    host_gap.main(["--blocks", "2", "--iterations", "8", "--device-ms", "1"])
    printed, told = capsys.readouterr()
    assert told.splitlines() == [f"measuring {case} with 2 blocks" for case in Case]
    for name in (*Case, *GAP_STAGES, *BESIDE_STAGES, "sum of these", "gap in the loop"):
        assert name in printed
