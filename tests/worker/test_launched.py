"""Iterations under way on a CPU: nothing is computed before somebody waits, and once only."""

import pytest
from tests.worker.checkpoints import LLADA, an_engine
from tests.worker.requests import a_pass, a_plan

from sangam_core.errors import EngineError


def test_a_cpu_computes_when_it_is_waited_for_so_that_events_do_not_wait_for_a_pass() -> None:
    engine = an_engine(LLADA)
    plan = a_plan(a_pass([5] * 20, masked=[3], pages=(0, 1)))
    launched = engine.launch(plan)
    written = engine.kv_pool.layers[0][0]
    assert written.isnan().all(), "as the test's engine leaves a page that nobody has written"
    outcome = launched.outcome()
    assert not written.isnan().any()
    assert launched.device_seconds is None
    assert outcome == engine.execute(plan)


def test_an_iteration_has_one_outcome() -> None:
    launched = an_engine(LLADA).launch(a_plan(a_pass([5] * 20, masked=[3])))
    launched.outcome()
    with pytest.raises(EngineError, match="has had its outcome"):
        launched.outcome()
