"""``make bench-gpu-serving``: forced commits, open-loop driving, batch 1 as a queue, the figure."""

import gc
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.loadtest.gpu.tiny import LLADA, ON_CPU

from benchmarks.gpu import engines
from benchmarks.gpu.engines import Place, load_graphs
from benchmarks.gpu.one_pass import plan_of
from benchmarks.gpu.parts import Budget
from benchmarks.gpu.serving.batch_one import (
    Point,
    ServiceTime,
    Work,
    curve,
    queued_latencies,
    rate_at,
)
from benchmarks.gpu.serving.command import main
from benchmarks.gpu.serving.forced_commits import ForcedCommits
from benchmarks.gpu.serving.open_loop import BlockLost, Driver, Layout
from benchmarks.gpu.serving.plain_loop import service_seconds
from benchmarks.gpu.serving.rates import (
    Window,
    Worker,
    arrivals,
    at_rate,
    climb,
    is_growing,
    mixture,
)
from benchmarks.iterations import Iteration
from sangam_core.errors import SangamError
from sangam_loadtest.traces.request import TraceRequest
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.plan import Launched, Plan

PLACE = Place("cpu", "float32", "torch", "torch")
TOKEN = 7


class Counts:
    """A block's passes commit these numbers."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def draw(self, rng: random.Random, num_masks: int, block: int) -> Sequence[int]:
        return self.counts


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_graphs(PLACE, LLADA, 40, [1, 2]).engine


def test_what_is_timed_is_on_random_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of kernels leave zeros behind them, which a device multiplies faster."""

    def loaded(*args: Any, **kwargs: Any) -> Engine:
        engine = load_engine(*args, **kwargs)
        capture = engine.capture_graphs

        def capture_graphs(**kwargs: Any) -> int:
            for layer in engine.kv_pool.layers:
                layer.zero_()
            return capture(**kwargs)

        engine.capture_graphs = capture_graphs  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(engines, "load_engine", loaded)
    for layer in load_graphs(PLACE, LLADA, 40, [1]).engine.kv_pool.layers:
        assert layer.std() > 0.9


def a_worker(engine: Engine, *counts: int, mask_buffer: int | None = None) -> Worker:
    def make(seed: int) -> ForcedCommits:
        return ForcedCommits(engine, Counts(*counts), TOKEN, seed)

    return Worker(make, Layout(engine.model_config, 32, mask_buffer), 40, 1024)


def never(driver: Driver) -> bool:
    return driver.elapsed_seconds > 60


# Forced commits


def test_passes_commit_as_many_as_drawn_the_lowest_masks_first(engine: Engine) -> None:
    forced = ForcedCommits(engine, Counts(20, 12), TOKEN)
    plan = plan_of(Iteration(0, 2, 64, 32), engine.model_config, 40)
    outcome = forced.launch(plan).outcome()
    for item, seen in zip(plan.passes, outcome.passes, strict=True):
        assert [commit.position for commit in seen.commits] == list(item.masked[:20])
        assert {commit.token for commit in seen.commits} == {TOKEN}
    left = tuple(item._replace(masked=item.masked[20:]) for item in plan.passes)
    last = forced.launch(replace(plan, passes=left)).outcome()
    assert [len(seen.commits) for seen in last.passes] == [12, 12]
    again = forced.launch(plan).outcome()
    assert [len(seen.commits) for seen in again.passes] == [20, 20]


def test_the_engine_does_its_own_work_for_each_pass(engine: Engine) -> None:
    plan = plan_of(Iteration(0, 1, 64, 32), engine.model_config, 40)
    pool = engine.kv_pool.layers[0]
    pool.zero_()
    ForcedCommits(engine, Counts(32), TOKEN).launch(plan).outcome()
    assert pool[list(plan.passes[0].pages[2:])].abs().sum() > 0


# Driving


def test_requests_are_served_block_by_block_with_the_commits_drawn(engine: Engine) -> None:
    worker = a_worker(engine, 30, 2)
    asked = [TraceRequest(20, 64), TraceRequest(33, 32)]
    requests = [worker.layout.request(index, 0.0, each) for index, each in enumerate(asked)]
    driver = worker.serve(requests, float("inf"), never)
    assert {request.index for request in driver.finished} == {0, 1}
    assert [request.num_passes for request in requests] == [4, 2]
    assert requests[0].ids[20:] == [TOKEN] * 64
    assert driver.num_tokens == 96
    assert all((request.latency_seconds or 0) > 0 for request in requests)


def test_a_fixed_mask_buffer_is_prefilled_and_only_the_output_is_decoded(engine: Engine) -> None:
    worker = a_worker(engine, 32, mask_buffer=96)
    request = worker.layout.request(0, 0.0, TraceRequest(20, 40))
    worker.serve([request], 1, never)
    mask = engine.model_config.mask_id
    assert request.geometry.total_tokens == 20 + 96
    assert request.ids[20:] == [TOKEN] * 64 + [mask] * 32


def test_one_at_a_time_serves_in_order_and_counts_the_waiting(engine: Engine) -> None:
    worker = a_worker(engine, 16, 16)
    requests = [worker.layout.request(index, 0.0, TraceRequest(20, 64)) for index in range(3)]
    driver = worker.serve(requests, 1, never)
    assert [request.index for request in driver.finished] == [0, 1, 2]
    latencies = [request.latency_seconds or 0.0 for request in requests]
    assert latencies == sorted(latencies)
    assert latencies[2] > (requests[2].service_seconds or 0.0)


class Broken:
    def launch(self, plan: Plan) -> Launched:
        raise SangamError("the device fell off the bus")


def test_a_lost_block_ends_the_run_with_its_reason(engine: Engine) -> None:
    worker = replace(a_worker(engine, 32), make_engine=lambda seed: Broken())
    request = worker.layout.request(0, 0.0, TraceRequest(20, 32))
    with pytest.raises(BlockLost, match="fell off the bus"):
        worker.serve([request], 1, never)


# Rates


def test_a_rate_counts_what_is_due_after_the_warm_up(engine: Engine) -> None:
    worker = a_worker(engine, 32)
    trace = [TraceRequest(20, 32)] * 200
    point = at_rate(worker, trace, 20.0, Window(0.2, 1.0, 30.0))
    assert 5 <= point.num_requests <= 30
    assert not point.is_saturated
    assert point.p99_seconds >= point.mean_seconds > 0


def test_a_run_that_is_over_before_its_requests_are_answered_is_saturated(engine: Engine) -> None:
    worker = a_worker(engine, *[1] * 32)
    trace = [TraceRequest(20, 320)] * 200
    point = at_rate(worker, trace, 50.0, Window(0.1, 0.4, 0.5))
    assert point.is_saturated


def test_latencies_that_grow_have_no_mean() -> None:
    assert is_growing([*range(1, 31)])
    assert not is_growing([1.0, 2.0] * 15)
    assert not is_growing([1.0, 10.0])


OF_ALL_LENGTHS = [TraceRequest(20, n) for n in random.Random(0).sample(range(1, 1001), 1000)]


@pytest.mark.parametrize("rate", [0.75, 2.0, 9.0])
def test_arrivals_are_as_many_as_the_rate_says_and_of_the_traces_mixture(rate: float) -> None:
    window = Window(15.0, 48.0, 70.0)
    due = arrivals(OF_ALL_LENGTHS, rate, window)
    assert [at for at, _ in due] == sorted(at for at, _ in due)
    counted = [asked for at, asked in due if 15 <= at <= 48]
    assert len(counted) == round(33 * rate)
    mean_output = np.mean([asked.output_tokens for asked in counted])
    assert mean_output == pytest.approx(500, abs=1000 / len(counted))
    gaps = np.diff([at for at, _ in due])
    assert 0.6 < gaps.std() / gaps.mean() < 1.5  # exponential: 1


def test_a_mixture_is_in_any_order_and_of_any_size() -> None:
    random_numbers = np.random.default_rng(0)
    assert mixture(OF_ALL_LENGTHS, 0, random_numbers) == []
    outputs = [each.output_tokens for each in mixture(OF_ALL_LENGTHS, 10, random_numbers)]
    assert outputs != sorted(outputs)
    assert sorted(n // 100 for n in (output - 1 for output in outputs)) == [*range(10)]


def test_a_window_is_shortened_where_several_would_not_fit() -> None:
    window = Window(15.0, 48.0, 70.0)
    assert window.fitting(1000.0) == window
    assert window.fitting(315.0) == Window(11.25, 36.0, 52.5)
    assert window.fitting(10.0) == Window(7.5, 24.0, 35.0)


def climbed(capacity: float, seconds: float = 1e6) -> list[Point]:
    """Points of a server that keeps up below a capacity, each run taking 10 seconds."""
    clock = [0.0]

    def run(rate: float) -> Point:
        clock[0] += 10
        mean = 1 / max(0.01, capacity - rate)
        return Point(rate, mean, 2 * mean, 50, is_saturated=rate >= capacity)

    budget = Budget(seconds, lambda: clock[0])
    return list(climb(1.0, run, budget, 10, enough_mean_seconds=5.0))


def test_rates_rise_until_one_is_too_high_and_then_close_in() -> None:
    rates = [point.rate for point in climbed(3.0)]
    assert rates[:4] == pytest.approx([1, 1.4, 1.96, 2.744])
    held = max(rate for rate in rates if 1 / (3.0 - rate) < 5)
    failed = min(rate for rate in rates if rate >= 3 or 1 / (3.0 - rate) >= 5)
    assert failed / held < 1.07


def test_rates_fall_where_the_first_is_too_high_and_end() -> None:
    assert [point.rate for point in climbed(0.4)][:2] == [1.0, 0.5]
    assert len(climbed(0.0)) < 8


def test_no_run_is_begun_without_time_for_it() -> None:
    assert len(climbed(3.0, seconds=35)) == 3


# Batch 1 as a queue


def some_works() -> Iterator[Work]:
    rng = random.Random(0)
    for _ in range(40):
        blocks = rng.randint(1, 30)
        yield Work(blocks, rng.randint(40, 3000), blocks * rng.randint(12, 24))


def test_service_times_follow_from_blocks_tokens_and_passes() -> None:
    works = list(some_works())
    exact = np.array([0.002 * w.num_blocks + 2.5e-5 * w.num_blocks * w.total_tokens for w in works])
    exact += np.array([0.0056 * w.num_passes for w in works])
    fitted = ServiceTime.fitted(works, exact.tolist())
    assert fitted.num_pass == pytest.approx(0.0056)
    assert fitted.relative_error < 1e-6
    assert fitted.seconds(works) == pytest.approx(exact)
    with pytest.raises(ValueError, match="measure more"):
        ServiceTime.fitted(works[:2], [1.0, 2.0])


def test_noise_makes_nothing_that_takes_time_away() -> None:
    works = [*some_works()]
    noise = random.Random(0)
    seconds = [0.0056 * work.num_passes * noise.uniform(0.9, 1.1) for work in works]
    for count in (5, 8, 40):
        fitted = ServiceTime.fitted(works[:count], seconds[:count])
        assert min(fitted.block, fitted.token, fitted.num_pass) >= 0
        assert fitted.seconds(works) == pytest.approx(seconds, rel=0.5)


def test_a_queue_serves_one_at_a_time() -> None:
    latencies = queued_latencies(np.array([0.0, 1.0, 1.5, 10.0]), np.array([2.0, 1.0, 1.0, 1.0]))
    assert latencies.tolist() == [2.0, 2.0, 2.5, 1.0]


def test_the_curves_mean_is_pollaczek_and_khinchines() -> None:
    service = np.full(200_000, 0.5)
    (point,) = curve(service, [1.2])
    load_share = 0.6
    expected = 0.5 + load_share * 0.5 / (2 * (1 - load_share))
    assert point.mean_seconds == pytest.approx(expected, rel=0.03)
    assert curve(service, [2.5]) == []


def test_the_rate_at_a_mean_is_read_between_steady_points() -> None:
    points = [Point(1, 1, 2, 9), Point(2, 3, 6, 9), Point(1.5, 9, 9, 9, is_saturated=True)]
    assert rate_at(points, 2.0) == pytest.approx(1.5)
    assert rate_at(points, 4.0) is None


def test_the_plain_loops_requests_take_their_blocks_times() -> None:
    measured = [(100, 1.0), (300, 2.0)]
    works = [Work(2, 200, 40), Work(1, 100, 20), Work(1, 1000, 20)]
    assert service_seconds(measured, works).tolist() == [3.0, 1.0, 2.0]


# The command


@pytest.fixture
def interpreter() -> Iterator[None]:
    """As it was before: the command makes it a worker's."""
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.timeout(300)
def test_the_command_measures_both_sides_and_draws_them(tmp_path: Path) -> None:
    options = [
        *ON_CPU, "--model", LLADA, "--out", str(tmp_path), "--mask-buffer", "0",
        "--max-prompt", "64", "--max-output", "64", "--single", "5", "--pages", "200",
        "--warm", "0.2", "--run", "1.5", "--longest", "8", "--max-runs", "3",
    ]  # fmt: skip
    assert main(options) == 0
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {part["status"] for part in results["parts"].values()} == {"done"}
    curves = results["parts"]["figure 8"]["found"]["curves"]
    assert len(curves) == 3
    assert all(curves.values())
    assert (tmp_path / "figure-8.png").stat().st_size > 5000
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "Requests a second at equal mean latency" in table
