"""What is measured of an iteration is what was asked for, and comes out in the agreed columns."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.iterations import BLOCK_LENGTH, Iteration, IterationBench, NotMeasured, Timing
from benchmarks.pass_costs import COLUMNS, Grid, Sample, main, measure_all, row_of
from benchmarks.progress_lines import ProgressLines

MODELS = Path(__file__).parents[1] / "golden" / "models"
LLADA = str(MODELS / "llada-tiny-a")
PROFILE_COLUMNS = (
    "model,engine,launch,prefill_tokens,decode_blocks,context_tokens,total_ms,"
    "without_attention_ms,host_ms"
)


def a_bench(model: str = LLADA, total_pages: int = 40, attention: str = "torch") -> IterationBench:
    return IterationBench(
        model, dtype="float32", device="cpu", attention=attention, total_pages=total_pages
    )


def a_sample(total_seconds: float, issue_seconds: float | None = None) -> Sample:
    whole = Timing(total_seconds, 0.001, total_seconds, issue_seconds, rows_masked=40)
    return Sample(whole, Timing(total_seconds / 2, 0.001, total_seconds / 2, None, 40))


def tiny(tmp_path: Path, *more: str) -> list[str]:
    return [
        "--model", LLADA, "--prefill-tokens", "48", "--decode-blocks", "2", "--context-tokens",
        "64", "--masks", "4", "--repeats", "1", "--out", str(tmp_path / "passes.csv"), *more,
    ]  # fmt: skip


def test_a_tiny_grid_is_measured_alone_and_mixed(tmp_path: Path) -> None:
    main(tiny(tmp_path))
    with (tmp_path / "passes.csv").open(encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert tuple(reader.fieldnames or ()) == COLUMNS
    assert ",".join(COLUMNS).startswith(PROFILE_COLUMNS)
    points = [(row["prefill_tokens"], row["decode_blocks"], row["context_tokens"]) for row in rows]
    assert points == [("48", "0", "48"), ("0", "2", "64"), ("48", "2", "64")]
    assert [row["rows_masked"] for row in rows] == ["32", "8", "40"]
    for row in rows:
        assert float(row["total_ms"]) > float(row["scheduler_ms"]) > 0
        assert float(row["without_attention_ms"]) > 0
        assert row["host_ms"] == ""
        assert (row["launch"], row["engine"], row["repeats"]) == ("eager", "sangam-torch", "1")


def test_on_no_terminal_lines_on_standard_error_tell_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(tiny(tmp_path))
    told = [line.partition(", ")[0] for line in capsys.readouterr().err.splitlines()]
    assert (told[0], told[-1]) == ("iterations measured: 0 of 6", "iterations measured: 6 of 6")


def test_lines_of_progress_are_ten_seconds_apart(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = ProgressLines("things", lambda: now[0])
    for done in range(50):
        now[0] = 0.5 * done
        lines(done, 50)
    told = capsys.readouterr().err.splitlines()
    assert told == [f"things: {done} of 50, {done // 2} s" for done in (0, 20, 40)]


def test_without_a_file_the_csv_goes_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tiny(tmp_path)
    main(options[: options.index("--out")])
    assert capsys.readouterr().out.startswith(PROFILE_COLUMNS)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prefill-tokens", "31"], "argument --prefill-tokens: 31 must be at least 32"),
        (["--decode-blocks", "0"], "argument --decode-blocks: 0 must be at least 1"),
        (["--context-tokens", "many"], "argument --context-tokens: 'many' is not a whole number"),
        (["--masks", "32"], "argument --masks: 32 must be 1 to 31"),
        (["--repeats", "0"], "argument --repeats: 0 must be at least 1"),
        (["--prefill-tokens", "999999"], "--prefill-tokens 999999: the model takes at most"),
        (["--context-tokens", "999999"], "--context-tokens 999999: the model takes at most"),
        (["--attention", "magic"], "attention 'magic' is unknown"),
        (["--device", "toaster"], "device 'toaster' cannot be used"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--out", "/nowhere/at/all.csv"], "argument --out: /nowhere/at/all.csv: No such file"),
        (["--prefill-tokens", "--decode-blocks"], "nothing to measure"),
    ],
)
def test_a_malformed_option_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(tiny(tmp_path, *options))
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "prefill_head_rows"), [("llada-tiny-a", 32), ("dream-tiny-a", 1)]
)
def test_the_passes_of_an_iteration_run_together_on_both_families(
    model: str, prefill_head_rows: int
) -> None:
    bench = a_bench(str(MODELS / model))
    assert bench.measure(Iteration(48, 0, 48, BLOCK_LENGTH)).rows_masked == prefill_head_rows
    assert bench.measure(Iteration(0, 3, 64, 5)).rows_masked == 15
    mixed = bench.measure(Iteration(48, 3, 64, 31))
    assert mixed.rows_masked == 93 + prefill_head_rows
    assert mixed.issue_seconds is None
    assert 0 < mixed.scheduler_seconds < mixed.total_seconds


def test_left_out_attention_changes_the_result_and_keeps_the_keys() -> None:
    bench = a_bench()
    iteration = Iteration(48, 0, 48, BLOCK_LENGTH)
    bench.measure(iteration, is_attention_left_out=True)
    first_layer = bench.engine.kv_pool.layers[0][:3].clone()
    second_layer = bench.engine.kv_pool.layers[1][:3].clone()
    assert first_layer.abs().sum() > 0
    bench.measure(iteration)
    assert bench.engine.kv_pool.layers[0][:3].equal(first_layer)
    assert not bench.engine.kv_pool.layers[1][:3].equal(second_layer)


def test_a_pool_that_is_too_small_is_said() -> None:
    with pytest.raises(NotMeasured, match="more pages"):
        a_bench(total_pages=4).measure(Iteration(0, 2, 64, 4))


def test_the_largest_iteration_fits_the_pages_that_it_says() -> None:
    iteration = Iteration(33, 2, 65, 4)
    assert iteration.num_pages == 2 * 5 + 3
    a_bench(total_pages=iteration.num_pages).measure(iteration)


def test_rounds_go_forwards_and_backwards_and_the_first_does_not_count() -> None:
    iterations = Grid([64], [1], [64], [4]).iterations()
    seen: list[Iteration] = []

    def measure(item: Iteration) -> Sample:
        seen.append(item)
        return a_sample(len(seen))

    samples = measure_all(iterations, measure, 2, budget_seconds=100.0)
    assert seen == [*reversed(iterations), *iterations, *reversed(iterations)]
    assert [s.whole.total_seconds for s in samples[iterations[0]]] == [4.0, 9.0]


@pytest.mark.parametrize(("budget_seconds", "counted"), [(1.0, 1), (40.0, 3), (1000.0, 5)])
def test_rounds_end_with_the_budget_but_not_before_one_counts(
    budget_seconds: float, counted: int
) -> None:
    clock, measure = a_clock_of(10.0)
    iteration = Iteration(64, 0, 64, BLOCK_LENGTH)
    samples = measure_all([iteration], measure, 5, budget_seconds, clock=clock)
    assert len(samples[iteration]) == counted


@pytest.mark.parametrize("budget_seconds", [1.0, 95.0, 1000.0])
def test_the_progress_is_complete_with_the_last_measurement_and_not_before(
    budget_seconds: float,
) -> None:
    clock, measure = a_clock_of(5.0)
    told: list[tuple[int, int]] = []
    iterations = [Iteration(64, 0, 64, BLOCK_LENGTH), Iteration(0, 1, 64, 4)]
    measure_all(
        iterations,
        measure,
        12,
        budget_seconds,
        lambda done, total: told.append((done, total)),
        clock,
    )
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert [done == total for done, total in told] == [False] * (len(told) - 1) + [True]


def a_clock_of(
    round_seconds: float,
) -> tuple[Callable[[], float], Callable[[Iteration], Sample]]:
    now = [0.0]

    def measure(item: Iteration) -> Sample:
        now[0] += round_seconds
        return a_sample(1.0)

    return lambda: now[0], measure


def test_after_each_counted_round_there_are_medians_of_all_iterations() -> None:
    iterations = Grid([64], [1], [64], [4]).iterations()
    counted: list[set[int]] = []

    def keep(samples: dict[Iteration, list[Sample]]) -> None:
        counted.append({len(samples[item]) for item in iterations})

    measure_all(iterations, lambda item: a_sample(1.0), 3, 100.0, on_round=keep)
    assert counted == [{1}, {2}, {3}]


def test_a_row_holds_medians_in_milliseconds() -> None:
    samples = [a_sample(seconds, issue_seconds=0.002) for seconds in (0.5, 0.01, 0.02)]
    row = row_of(Iteration(64, 2, 64, 4), samples)
    assert (row["total_ms"], row["without_attention_ms"]) == ("20.0000", "10.0000")
    assert (row["host_ms"], row["scheduler_ms"]) == ("2.0000", "1.0000")
    assert (row["rows_masked"], row["repeats"]) == ("40", "3")
