"""Ties break by ids alone: the same everywhere, and without herding."""

import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sangam_core.ties import tie_break, tie_breaker

IDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)


@given(IDS, IDS)
def test_a_tie_break_is_a_64_bit_number_that_never_changes(request: str, worker: str) -> None:
    assert tie_break(request, worker) == tie_break(request, worker)
    assert 0 <= tie_break(request, worker) < 2**64


@given(IDS, IDS, IDS, IDS)
def test_other_ids_give_another_number(a: str, b: str, c: str, d: str) -> None:
    assert ((a, b) == (c, d)) == (tie_break(a, b) == tie_break(c, d))


@given(IDS, IDS)
def test_many_ties_of_one_request_break_as_single_ones_do(request: str, worker: str) -> None:
    assert int.from_bytes(tie_breaker(request)(worker), "big") == tie_break(request, worker)


def test_another_process_gives_the_same_number() -> None:
    code = "from sangam_core.ties import tie_break; print(tie_break('request-1', 'worker-1'))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(run.stdout) == tie_break("request-1", "worker-1")


def test_requests_spread_over_workers_that_are_equally_good() -> None:
    workers = [f"worker-{number}" for number in range(4)]
    chosen = Counter(
        min(workers, key=lambda worker: tie_break(f"request-{number}", worker))
        for number in range(400)
    )
    assert all(60 <= chosen[worker] <= 140 for worker in workers), chosen
