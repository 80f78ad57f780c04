"""Ties break by ids alone: the same everywhere, and without herding."""

import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sangam_core.ties import tie_breaker

IDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)


@given(IDS, IDS, IDS, IDS)
def test_other_ids_break_ties_otherwise(a: str, b: str, c: str, d: str) -> None:
    assert ((a, b) == (c, d)) == (tie_breaker(a)(b) == tie_breaker(c)(d))


@given(IDS, IDS, IDS)
def test_many_ties_of_one_request_break_as_single_ones_do(request: str, one: str, two: str) -> None:
    break_tie = tie_breaker(request)
    assert [break_tie(one), break_tie(two)] == [
        tie_breaker(request)(one),
        tie_breaker(request)(two),
    ]


def test_another_process_breaks_a_tie_alike() -> None:
    broken = "tie_breaker('request-1')('worker-1')"
    code = f"from sangam_core.ties import tie_breaker; print({broken}.hex())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.strip() == tie_breaker("request-1")("worker-1").hex()


def test_requests_spread_over_workers_that_are_equally_good() -> None:
    workers = [f"worker-{number}" for number in range(4)]
    chosen = Counter(min(workers, key=tie_breaker(f"request-{number}")) for number in range(400))
    assert all(60 <= chosen[worker] <= 140 for worker in workers), chosen
