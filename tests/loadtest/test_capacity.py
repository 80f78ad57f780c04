"""The search for capacity doubles, bisects, counts failures, and goes on where it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sangam_core.errors import ConfigurationError
from sangam_loadtest.capacity import (
    ClientTooSlow,
    Objective,
    ProbeResult,
    Search,
    find_capacity,
    judge,
)
from sangam_loadtest.capacity_state import CapacityState, StateError
from sangam_loadtest.client.health import ClientHealth
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.summary import Summary, summarise

SERVICE_RATE = 10.0


def record(index: int, latency: float | None, **changes: Any) -> RequestRecord:
    error = None if latency is not None else "timeout"
    made = RequestRecord(index, index * 0.1, index * 0.1, 10, 20, latency_seconds=latency)
    return replace(made, error=error, **changes)


def queue(rate: float, capacity: float = SERVICE_RATE) -> Summary:
    """A server with one queue: mean latency 1 / (capacity - rate), failures beyond it."""
    if rate >= capacity:
        return summarise([record(0, 1.0), record(1, None)])
    return summarise([record(0, 1 / (capacity - rate))])


def search(**changes: Any) -> Search:
    chosen = Search((Objective.parse("mean<=0.5"),), start_rate=1.0, tolerance=0.01)
    return replace(chosen, **changes)


@pytest.mark.parametrize("start_rate", [0.3, 1.0, 64.0])
def test_the_highest_rate_that_holds_is_found(start_rate: float) -> None:
    found = find_capacity(search(start_rate=start_rate), queue)
    assert found.highest_held is not None
    assert found.lowest_violated is not None
    assert found.highest_held <= 8.0 < found.lowest_violated * 1.0001
    assert found.lowest_violated <= found.highest_held * 1.01


def test_rates_double_before_they_are_bisected() -> None:
    rates = [probe.rate for probe in find_capacity(search(tolerance=0.2), queue).probes]
    assert rates[:5] == [1, 2, 4, 8, 16]
    assert rates[5] == 12
    assert len(rates) == len(set(rates))


def test_a_search_that_never_fails_ends_at_the_highest_rate() -> None:
    found = find_capacity(search(max_rate=7.0), queue)
    assert (found.highest_held, found.lowest_violated) == (7.0, None)


def test_a_search_that_never_holds_says_so() -> None:
    found = find_capacity(search(min_rate=0.25), lambda rate: queue(rate, capacity=0.1))
    assert (found.highest_held, found.lowest_violated) == (None, 0.25)


def test_failures_are_violations_unless_a_share_is_allowed() -> None:
    summary = summarise([record(n, 0.1) for n in range(9)] + [record(9, None)])
    assert judge(search(), 1.0, summary).violations == ["1 of 10 failed (1 timeout)"]
    assert judge(search(max_failed_share=0.1), 1.0, summary).holds


def test_every_objective_has_to_hold() -> None:
    summary = summarise([record(0, 1.0, queueing_seconds=0.7), record(1, 3.0)])
    objectives = ("mean<=2.5", "max<=2.9", "queueing.p50<=0.6", "transfer.mean<=1")
    result = judge(search(objectives=tuple(map(Objective.parse, objectives))), 1.0, summary)
    assert result.violations == [
        "latency.max<=2.9: 3.000",
        "queueing.p50<=0.6: 0.700",
        "transfer.mean<=1: no request has this metric",
    ]


@pytest.mark.parametrize(
    "text", ["p99", "p99<7", "p98<=7", "speed.mean<=7", "mean<=0", "mean<=1.2.3", "<=7", "mean>=7"]
)
def test_objectives_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="objective"):
        Objective.parse(text)


def with_health(lag_seconds: float, cpu_share: float = 0.3) -> Summary:
    health = ClientHealth(1000, 0, 0.0, lag_seconds, lag_seconds, cpu_share, 10, 1000)
    return replace(queue(1.0), health=health, complaints=health.complaints())


@pytest.mark.parametrize("summary", [with_health(0.2), with_health(0.01, cpu_share=0.95)])
def test_a_client_that_is_too_slow_ends_the_search(summary: Summary) -> None:
    with pytest.raises(ClientTooSlow, match=r"at 1 requests/s"):
        find_capacity(search(), lambda rate: summary)


def test_a_lag_that_is_small_against_the_objectives_does_not_end_the_search() -> None:
    objectives = (Objective.parse("mean<=20"),)
    found = find_capacity(search(objectives=objectives, max_rate=2), lambda _: with_health(0.2))
    assert found.highest_held == 2


def test_an_interrupted_search_goes_on_with_the_probes_it_has(tmp_path: Path) -> None:
    path, parameters = tmp_path / "deep" / "state.json", {"seed": 1, "urls": ("a",)}
    whole = find_capacity(search(), queue)
    state = CapacityState(path, parameters)

    def interrupted(rate: float) -> Summary:
        if len(state.probes) == 6:
            raise KeyboardInterrupt
        return queue(rate)

    with pytest.raises(KeyboardInterrupt):
        find_capacity(search(), interrupted, state.probes, state.add)

    again = CapacityState(path, parameters)
    assert len(again.probes) == 6
    asked: list[float] = []

    def probe(rate: float) -> Summary:
        asked.append(rate)
        return queue(rate)

    resumed = find_capacity(search(), probe, tuple(again.probes), again.add)
    assert resumed == whole
    assert asked == [result.rate for result in whole.probes[6:]]


def test_a_state_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    CapacityState(path, {"run": {"seed": 1}}).add(ProbeResult(1.0, {"x": 1.0}, 1, 0))
    with pytest.raises(StateError, match=r"run.seed: 1 there, 2 here"):
        CapacityState(path, {"run": {"seed": 2}})


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"version": 9, "parameters": {}, "probes": []}']
)
def test_a_damaged_state_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    with pytest.raises(StateError, match=r"state\.json"):
        CapacityState(path, {})


@pytest.mark.parametrize(
    "changes",
    [{"objectives": ()}, {"start_rate": 9999.0}, {"tolerance": 0.0}, {"max_failed_share": 1.0}],
)
def test_searches_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        search(**changes)
