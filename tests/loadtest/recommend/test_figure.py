"""The figure shows every finalist's line up to the bound, whatever it is of."""

from pathlib import Path

import pytest
from tests.loadtest.recommend.builders import candidate, trial

from sangam_loadtest.capacity import Capacity, Objective
from sangam_loadtest.recommend.candidates import Candidate
from sangam_loadtest.recommend.figure import draw_capacity
from sangam_loadtest.recommend.search import Finalist


def finalist(chosen: Candidate, *latencies: float) -> Finalist:
    curve = tuple(
        trial(seconds, chosen, rate=5.0 * (place + 1), growth="grows" if seconds > 9 else None)
        for place, seconds in enumerate(latencies)
    )
    return Finalist(curve[0], Capacity(5.0, 10.0, []), curve)


@pytest.mark.parametrize("num_objectives", [1, 2, 3])
def test_a_panel_for_each_objective(num_objectives: int, tmp_path: Path) -> None:
    objectives = [
        Objective("latency", "mean", 7.0),
        Objective("latency", "p99", 0.5),
        Objective("first_token", "mean", 3.0),  # which no request has
    ][:num_objectives]
    finalists = [
        finalist(candidate("8C"), 2.0, 3.0, 100.0),
        finalist(candidate("5P3C"), 2.0, 3.0, 90.0),
        finalist(candidate("5P3D"), 2.0, 3.0, 90.0),
    ]
    path = tmp_path / "capacity.png"
    draw_capacity(finalists, objectives, "8 x h100", path)
    assert path.stat().st_size > 10_000
    again = tmp_path / "again.png"
    draw_capacity(finalists, objectives, "8 x h100", again)
    assert again.read_bytes() == path.read_bytes()
