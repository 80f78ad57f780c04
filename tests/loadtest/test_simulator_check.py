"""The check of the simulator: what is compared, and how a first run tells the host's costs."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.host_costs import (
    PassMeans,
    RowMeans,
    Simulated,
    transfer_seconds,
    unaccounted_seconds,
    with_host_costs,
)
from benchmarks.local_runs import others_seconds
from benchmarks.simulator_check import SYSTEM, Agreement, Deployment, latencies, main, write_trace
from sangam_loadtest.arrivals import Arrivals
from sangam_loadtest.costs.batch import PassBatch
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.table import read_table
from sangam_loadtest.load import Load
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.simulator.commits import GeometricCommits
from sangam_loadtest.simulator.system import Split, System
from sangam_loadtest.simulator.worker import Iteration
from sangam_loadtest.summary import Distribution
from sangam_loadtest.traces.length_filter import LengthFilter
from sangam_loadtest.traces.source import TraceSpec


def a_record(**known: object) -> RequestRecord:
    values: dict[str, object] = {
        "latency_seconds": 1.0,
        "queueing_seconds": 0.1,
        "prefill_seconds": 0.2,
        "decode_seconds": 0.3,
        "transfer_seconds": 0.0,
        "num_blocks": 2,
        "num_steps": 6,
        "placements": [["worker-0"], ["worker-0"]],
    }
    return RequestRecord(0, 0.0, 0.0, 100, 64, **(values | known))  # type: ignore[arg-type]


def a_distribution(mean: float, p99: float) -> Distribution:
    return Distribution(count=100, mean=mean, p50=mean, p90=mean, p99=p99, max=p99)


def an_agreement(mean: float, p99: float) -> Agreement:
    return Agreement("1C", 4.0, 0.5, a_distribution(1, 2), a_distribution(mean, p99), None)


def a_deployment(split: str) -> Deployment:
    """Made-up constants of a slow device, so that the host's part is a part of it."""
    table = read_table(None).with_entry("gpus", "cpu", Gpu(5e10, 5e10, 2e9, 16e9))
    commits = GeometricCommits.calibrated(4.0)
    return Deployment(System(Split.parse(split), 2048), table, commits)


def a_load(rate: float, num_requests: int) -> Load:
    trace = TraceSpec("sharegpt", 3, LengthFilter(max_prompt=300, max_output=128))
    return Load(trace, Arrivals(rate=rate, seed=3), num_requests=num_requests)


@pytest.mark.parametrize(
    ("mean", "p99", "is_within"),
    [(1, 2, True), (1.19, 1.61, True), (1.21, 2, False), (1, 1.59, False), (0.79, 2, False)],
)
def test_mean_and_p99_must_both_be_within_the_tolerance(
    mean: float, p99: float, is_within: bool
) -> None:
    assert an_agreement(mean, p99).is_within(0.2) == is_within


def test_warm_up_and_failures_are_not_compared() -> None:
    records = [
        a_record(),
        a_record(latency_seconds=9.0, is_warmup=True),
        a_record(latency_seconds=None, error="timeout"),
    ]
    assert (latencies(records).count, latencies(records).max) == (1, 1.0)


def test_the_trace_has_whole_blocks_and_follows_from_its_seed(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.csv" for number in range(3)]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        write_trace(path, seed)
    first, again, other = (path.read_text(encoding="utf-8") for path in paths)
    assert first == again != other
    outputs = {int(line.split(",")[1]) for line in first.splitlines()[1:]}
    assert outputs == {32, 64, 96, 128}


def test_what_no_part_accounts_for_is_shared_by_dispatches() -> None:
    colocated = a_record()  # two dispatches, 0.4 s
    moved = a_record(placements=[["worker-0", "worker-1"], ["worker-0", "worker-1"]])
    assert unaccounted_seconds([colocated]) == pytest.approx(0.2)
    assert unaccounted_seconds([moved]) == pytest.approx(0.1)
    assert unaccounted_seconds([colocated, moved]) == pytest.approx(0.8 / 6)
    assert unaccounted_seconds([a_record(queueing_seconds=0.9)]) == 0.0


def test_a_transfers_time_is_per_block_that_moved() -> None:
    moved_once = a_record(placements=[["worker-0", "worker-1"], ["worker-0"]], transfer_seconds=0.1)
    assert transfer_seconds([moved_once, a_record()]) == pytest.approx(0.1)
    assert transfer_seconds([a_record()]) == 0.0


def test_means_are_of_passes_and_of_the_rows_that_blocks_shared() -> None:
    assert PassMeans.of([a_record(), a_record(is_warmup=True, prefill_seconds=9.0)]) == PassMeans(
        prefill=pytest.approx(0.1), decode=pytest.approx(0.075)
    )
    mixed = PassBatch(num_decodes=2, decode_rows=64, num_prefills=1, prefill_rows=100)
    alone = PassBatch(num_decodes=1, decode_rows=32)
    means = RowMeans.of([Iteration(0, 0.0, 1.0, mixed), Iteration(0, 1.0, 1.0, alone)])
    assert means == RowMeans(prefill=164, decode=(2 * 164 + 32) / 3)


@pytest.mark.parametrize("split", ["1C", "1P1D"])
def test_the_hosts_costs_of_a_run_are_found_again(split: str) -> None:
    deployment = a_deployment(split)
    load = a_load(rate=1.5, num_requests=50)
    shipped = deployment.table.systems[SYSTEM]
    real = replace(
        shipped,
        pass_seconds=0.02,
        row_seconds=4e-5,
        request_seconds=0.03,
        transfer_fixed_seconds=0.05,
    )
    records = [
        # A real run's queueing does not hold the dispatches, a simulated one's does.
        replace(
            record,
            queueing_seconds=(record.queueing_seconds or 0.0)
            - real.request_seconds * sum(map(len, record.placements)),
        )
        for record in deployment.with_constants(real).simulate(load).records
    ]

    def simulate(constants: object) -> Simulated:
        return deployment.with_constants(constants).simulate(load)  # type: ignore[arg-type]

    found = with_host_costs(replace(shipped, pass_seconds=0.001), records, simulate)
    for name in ("pass_seconds", "row_seconds", "request_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(real, name), rel=0.15), name
    if "P" in split:
        assert found.transfer_fixed_seconds == pytest.approx(0.05, rel=0.1)
    again = deployment.with_constants(found).simulate(load).records
    assert latencies(again).mean == pytest.approx(
        latencies(deployment.with_constants(real).simulate(load).records).mean, rel=0.05
    )


def test_capacity_is_what_is_answered_when_too_many_come() -> None:
    deployment = a_deployment("1C")
    load = a_load(rate=1.0, num_requests=30)
    capacity = deployment.capacity(load)
    below = deployment.simulate(load.at(0.5 * capacity)).records
    above = deployment.simulate(replace(load.at(3 * capacity), num_requests=120)).records
    assert latencies(above).mean > 5 * latencies(below).mean


def test_others_cpu_time_is_the_machines_less_our_own(tmp_path: Path) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"cpu {50 * ticks} {10 * ticks} {20 * ticks} 999 0 0\ncpu0 1\n")
    fields = " ".join(["S", *["0"] * 10, str(7 * ticks), str(3 * ticks), *["0"] * 20])
    (tmp_path / "41").mkdir()
    (tmp_path / "41" / "stat").write_text(f"41 (a name) with) {fields}\n")
    assert others_seconds([41], tmp_path) == 70.0
    with pytest.raises(OSError, match="42"):
        others_seconds([42], tmp_path)


@pytest.mark.parametrize("fleet", ["1C", "1C:", "1C:0.5,high", "1C:1.5", "2X:0.5", "1D:0.5"])
def test_a_malformed_fleet_is_refused(
    fleet: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["simulator_check", "--fleets", fleet])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "argument --fleets" in capsys.readouterr().err
