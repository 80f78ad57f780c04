"""The host's gap is measured on whole iterations: every stage takes time, the table names it."""

import gc
import sys
from collections.abc import Iterator

import pytest

from benchmarks import host_gap
from benchmarks.host_gap import BESIDE_STAGES, GAP_STAGES, PACK, Host, MadeUp
from sangam_worker.packing import rows_that_predict


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()


def test_every_stage_is_timed() -> None:
    stages = host_gap.stage_microseconds(num_blocks=3, num_iterations=12)
    assert set(stages) == {*GAP_STAGES, *BESIDE_STAGES, PACK}
    assert all(value > 0 for value in stages.values())


@pytest.mark.parametrize("is_spun", [False, True])
def test_the_loop_s_gap_is_measured_with_either_wait(is_spun: bool) -> None:
    middle, late = host_gap.gap_microseconds(2, 12, device_seconds=0.001, is_spun=is_spun)
    assert 0 < middle <= late


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
    printed = capsys.readouterr().out
    for name in (*GAP_STAGES, *BESIDE_STAGES, "sum of these", "gap in the loop"):
        assert name in printed
