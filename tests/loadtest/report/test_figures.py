"""Every figure is drawn with its numbers beside it, or says what it lacks."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.loadtest.report.records import label, records, run, sweep

from sangam_loadtest.records import RequestRecord
from sangam_loadtest.report import figures
from sangam_loadtest.report.axis_cap import axis_cap
from sangam_loadtest.report.drawn import Drawn, NothingToDraw
from sangam_loadtest.report.figures.breakdown import parts_of
from sangam_loadtest.report.figures.iterations import bins_of
from sangam_loadtest.report.figures.tau import sweeps_of
from sangam_loadtest.report.passes import Passes
from sangam_loadtest.report.runs import Run, run_of

Drawing = Callable[[list[Run], Path], Drawn]
RUN_FIGURES: list[Drawing] = [
    figures.latency_against_rate,
    figures.latency_breakdown,
    figures.queueing_and_decode_cdfs,
    figures.tau_sweep,
    figures.iterations_against_output,
]


def column(drawn: Drawn, name: str) -> list[object]:
    return [row[drawn.table.columns.index(name)] for row in drawn.table.rows]


def size_of(png: Path) -> tuple[int, int]:
    """Width and height in pixels."""
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def bare(num: int = 20) -> Run:
    """A run of another server: latencies alone."""
    rows = [
        RequestRecord(n, float(n), float(n), 10, 20, latency_seconds=1.0 + n % 3)
        for n in range(num)
    ]
    return run_of(label(configuration="other", system=None, tau_tokens=None), rows)


@pytest.mark.parametrize("draw", RUN_FIGURES)
def test_a_figure_has_an_image_a_caption_an_alternative_text_and_a_table(
    draw: Drawing, tmp_path: Path
) -> None:
    runs = [
        each for tau in (512, 1024) for each in sweep(["8C", "4P4D"], [2, 20], 120, tau_tokens=tau)
    ]
    drawn = draw(runs, tmp_path / "new" / "figure.png")
    assert drawn.path == tmp_path / "new" / "figure.png"
    assert min(size_of(drawn.path)) >= 500
    assert drawn.caption.endswith(".")
    assert "table below" in drawn.alt
    assert drawn.table.rows
    assert all(len(row) == len(drawn.table.columns) for row in drawn.table.rows)


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_figures_come_in_vector_formats_and_the_same_runs_give_the_same_bytes(
    suffix: str, tmp_path: Path
) -> None:
    runs = sweep(["8C"], [2], 50)
    contents = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.{suffix}"
        figures.latency_breakdown(runs, path)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    assert contents[0].startswith({"svg": b"<?xml", "pdf": b"%PDF"}[suffix])


@pytest.mark.parametrize("draw", RUN_FIGURES)
def test_a_figure_that_lacks_its_numbers_is_not_drawn_and_says_what_gives_them(
    draw: Drawing, tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    if draw is figures.latency_against_rate:
        runs = [run_of(label(rate=None), records(num_requests=5))]
    else:
        runs = [bare()]
    with pytest.raises(NothingToDraw, match=r"sangam loadtest|token budgets"):
        draw(runs, path)
    assert not path.exists()


def test_latency_tells_mean_and_p99_of_each_run_by_line_and_rate(tmp_path: Path) -> None:
    runs = sweep(["4P4D", "8C"], [6, 2], 100)
    drawn = figures.latency_against_rate(runs, tmp_path / "f.png")
    assert column(drawn, "configuration") == ["8C", "8C", "4P4D", "4P4D"]
    assert column(drawn, "requests/s") == [2, 6, 2, 6]
    assert column(drawn, "mean (s)")[0] == pytest.approx(runs[3].latency_seconds.mean())
    assert column(drawn, "P99 (s)")[0] == pytest.approx(np.percentile(runs[3].latency_seconds, 99))
    assert drawn.notes == ()


def test_saturated_points_are_told_and_do_not_stretch_the_axis(tmp_path: Path) -> None:
    runs = [run("8C", 2.0, 200), run("8C", 6.0, 200), run("8C", 60.0, 200)]
    drawn = figures.latency_against_rate(runs, tmp_path / "f.png")
    assert column(drawn, "saturated")[:2] == ["no", "no"]
    assert "grows" in str(column(drawn, "saturated")[2])
    assert [note.split()[0] for note in drawn.notes] == ["Hollow", "A"]


def test_an_axis_ends_above_the_highest_value_of_a_steady_run() -> None:
    assert axis_cap([1, 2, 3], [False] * 3) is None
    assert axis_cap([1, 2, 50], [False, False, True]) == pytest.approx(2 * 1.12)
    assert axis_cap([1, 2, 2.1], [False, False, True]) is None
    assert axis_cap([1, 1, 1, 100], [False] * 4) == pytest.approx(6 * 1.12)
    assert axis_cap([4, 50], [True, True]) == 8
    assert axis_cap([float("nan")], [False]) is None
    assert axis_cap([], []) is None


def test_more_facets_than_fit_a_row_are_drawn_in_several(tmp_path: Path) -> None:
    runs = [run(num=20, model=f"model-{n}", trace=None) for n in range(5)]
    drawn = figures.latency_against_rate(runs, tmp_path / "f.png")
    assert len(drawn.table.rows) == 5
    assert size_of(drawn.path) == (2200, 1980)


def test_a_breakdowns_parts_add_up_to_the_latency() -> None:
    each = run("6P2D", 6.0, 400)
    mean = parts_of(each, "mean request")
    assert sum(mean.values()) == pytest.approx(each.latency_seconds.mean())
    assert list(mean) == [
        "prefill queueing",
        "prefill",
        "transfer",
        "decode queueing",
        "decode",
        "rest",
    ]
    p99 = parts_of(each, "P99 request")
    assert sum(p99.values()) == pytest.approx(np.percentile(each.latency_seconds, 99), rel=0.05)


def test_a_p99_request_is_the_mean_of_those_around_the_99th_percentile() -> None:
    def made(num: int) -> Run:
        rows = [
            RequestRecord(
                n, float(n), float(n), 1, 1, latency_seconds=float(n), decode_seconds=float(n)
            )
            for n in range(num)
        ]
        return run_of(label(), rows)

    assert parts_of(made(1001), "P99 request")["decode"] == pytest.approx(990)
    assert parts_of(made(101), "P99 request")["decode"] == pytest.approx(98)  # the last five
    assert parts_of(made(3), "P99 request")["decode"] == pytest.approx(1)


def test_queueing_that_is_not_split_is_one_part(tmp_path: Path) -> None:
    rows = [
        replace(row, prefill_queueing_seconds=None, decode_queueing_seconds=None)
        for row in records(num_requests=60)
    ]
    runs = [run_of(label(), rows)]
    assert "queueing" in parts_of(runs[0], "mean request")
    assert "queueing (s)" in figures.latency_breakdown(runs, tmp_path / "b.png").table.columns
    drawn = figures.queueing_and_decode_cdfs(runs, tmp_path / "f.png")
    assert column(drawn, "time") == ["queueing", "decode"]
    assert "do not tell" in drawn.notes[0]


def test_runs_with_and_without_parts_are_drawn_together(tmp_path: Path) -> None:
    drawn = figures.latency_breakdown([run("8C", 6.0, 40), bare()], tmp_path / "f.png")
    assert set(column(drawn, "configuration")) == {"8C, paper"}


def test_distributions_tell_percentiles_at_the_rate_asked_for(tmp_path: Path) -> None:
    runs = sweep(["8C", "6P2D"], [2, 6], 200)
    drawn = figures.queueing_and_decode_cdfs(runs, tmp_path / "f.png", rates=[2.0])
    assert set(column(drawn, "requests/s")) == {2}
    assert (
        column(drawn, "time") == ["prefill queueing"] * 2 + ["decode queueing"] * 2 + ["decode"] * 2
    )
    assert column(drawn, "P90 (s)")[4] == pytest.approx(runs[0].percentile("decode_seconds", 90))
    with pytest.raises(NothingToDraw, match="its rates: 2 and 6"):
        figures.queueing_and_decode_cdfs(runs, tmp_path / "f.png", rates=[7.0])


def test_a_sweep_is_one_configuration_with_two_budgets_or_more(tmp_path: Path) -> None:
    swept = [run("8C", rate, 60, tau_tokens=tau) for tau in (2048, 512) for rate in (2, 4)]
    runs = [*swept, run("4P4D", 2.0, 60), bare()]
    assert [(sweep[1], len(found)) for sweep, found in sweeps_of(runs).items()] == [("8C", 4)]
    drawn = figures.tau_sweep(runs, tmp_path / "f.png")
    assert column(drawn, "τ (tokens)") == [512, 2048, 512, 2048]
    assert column(drawn, "requests/s") == [2, 2, 4, 4]


def test_a_sweep_without_a_rate_in_common_is_drawn_against_rates_alone(tmp_path: Path) -> None:
    runs = [run("8C", 2.0, 60, tau_tokens=512), run("8C", 4.0, 60, tau_tokens=1024)]
    assert len(figures.tau_sweep(runs, tmp_path / "f.png").table.rows) == 2


def test_a_sweep_of_many_rates_shows_six_of_them_against_tau(tmp_path: Path) -> None:
    runs = [run("8C", float(r), 20, tau_tokens=tau) for tau in (512, 1024) for r in range(1, 10)]
    assert len(figures.tau_sweep(runs, tmp_path / "f.png").table.rows) == 18


def test_iterations_are_binned_by_output_length() -> None:
    output = np.repeat(np.arange(1.0, 161.0), 10)
    bins = bins_of(output, output / 2)
    assert [(b.first_tokens, b.last_tokens) for b in bins[:2]] == [(1, 10), (11, 20)]
    assert bins[0].num_requests == 100
    assert bins[0].quartiles[1] == pytest.approx(2.75)
    assert bins_of(np.array([5.0]), np.array([2.0])) == []


def test_iterations_are_by_model_and_by_kind_where_there_are_both(tmp_path: Path) -> None:
    runs = [run(num=700), run(num=30, model="dream-7b")]
    drawn = figures.iterations_against_output(runs, tmp_path / "f.png")
    assert set(column(drawn, "model")) == {"LLaDA-8B", "Dream-7B"}
    mixed = [run(num=50), run(num=50, kind="measured")]
    drawn = figures.iterations_against_output(mixed, tmp_path / "f.png")
    assert set(column(drawn, "model")) == {"LLaDA-8B, simulated", "LLaDA-8B, measured"}


def passes(blocks: list[int], context: list[int], milliseconds: list[float]) -> Passes:
    numbers = (np.array(values, dtype=np.float64) for values in (blocks, context, milliseconds))
    blocks_of, context_of, ms = numbers
    return Passes("llada-8b", "fused graph", blocks_of, context_of, ms / 1000)


def test_a_benchmarks_contexts_are_a_line_each(tmp_path: Path) -> None:
    measured = passes([1, 8, 1, 8], [1024, 1024, 2048, 2048], [5, 9, 6, 11])
    drawn = figures.decode_time_against_batch([measured], tmp_path / "f.png")
    assert min(size_of(drawn.path)) >= 500
    assert column(drawn, "context") == ["1,024 keys a block"] * 2 + ["2,048 keys a block"] * 2
    assert column(drawn, "median (ms)") == [pytest.approx(ms) for ms in (5, 9, 6, 11)]


def test_a_runs_passes_are_summed_up_by_batch(tmp_path: Path) -> None:
    simulated = passes([1, 1, 1, 4, 4], [100, 150, 130, 400, 300], [5, 7, 6, 9, 11])
    drawn = figures.decode_time_against_batch([simulated], tmp_path / "f.png")
    assert column(drawn, "context") == ["100 to 400 keys a block"] * 2
    assert column(drawn, "passes") == [3, 2]
    assert column(drawn, "median (ms)") == [pytest.approx(6), pytest.approx(10)]
    few = passes([1, 2], [700, 500], [5, 6])
    drawn = figures.decode_time_against_batch([few], tmp_path / "f.png")
    assert column(drawn, "decode blocks") == [1, 2]


def test_without_passes_the_figure_says_what_gives_them(tmp_path: Path) -> None:
    with pytest.raises(NothingToDraw, match="--passes"):
        figures.decode_time_against_batch([], tmp_path / "f.png")
