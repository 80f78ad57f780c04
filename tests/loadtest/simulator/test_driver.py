"""Requests through the simulator: light load in closed form, queues, transfers, one at a time."""

from dataclasses import replace
from typing import Any

import pytest
from tests.loadtest.simulator.builders import (
    EqualCommits,
    FlatCosts,
    a_plan,
    a_run,
    a_system,
    a_world,
)

from sangam_core.admission import ADAPTIVE
from sangam_loadtest.records import RequestRecord

MOVING = FlatCosts(host_seconds_per_request=0.125, transfer_latency=0.5, transfer_busy=0.5)
ONE_PASS = EqualCommits(32)


def parts(record: RequestRecord) -> float:
    return (
        record.prefill_queueing_seconds
        + record.decode_queueing_seconds
        + record.prefill_seconds
        + record.decode_seconds
        + record.transfer_seconds
    )


def latencies(records: list[RequestRecord]) -> list[float]:
    return [record.latency_seconds for record in records]


def test_alone_a_request_takes_the_sum_of_its_passes() -> None:
    """Three blocks of a prefill and three decodes, and the host in front of each block."""
    costs = FlatCosts(host_seconds_per_request=0.125)
    (record,) = a_run(a_plan((5.0, 32, 96)), a_system("8C"), costs=costs).records
    assert record.latency_seconds == 3 * (0.125 + 1.0 + 3 * 0.25)
    assert (record.num_blocks, record.num_steps) == (3, 12)
    assert record.prefill_queueing_seconds == 3 * 0.125
    assert (record.prefill_seconds, record.decode_seconds) == (3.0, 9 * 0.25)
    assert (record.decode_queueing_seconds, record.transfer_seconds) == (0.0, 0.0)
    assert record.first_token_seconds == 1.125


def test_alone_a_request_that_moves_takes_its_transfers_too() -> None:
    (record,) = a_run(a_plan((5.0, 32, 96)), a_system("1P1D"), costs=MOVING).records
    assert record.latency_seconds == 3 * (0.125 + 1.0 + 0.125 + 0.5 + 3 * 0.25)
    assert record.transfer_seconds == 3 * 0.5
    assert record.decode_queueing_seconds == 3 * 0.125
    assert record.placements == [["worker-0", "worker-1"]] * 3


def test_a_block_that_its_prefill_completes_never_moves() -> None:
    (record,) = a_run(
        a_plan((0.0, 32, 64)), a_system("1P1D"), costs=MOVING, commits=ONE_PASS
    ).records
    assert record.placements == [["worker-0"]] * 2
    assert record.latency_seconds == 2 * (0.125 + 1.0)


def test_an_answer_ends_in_its_last_block_and_pass() -> None:
    """L is 96 tokens, the answer's 42nd token is the second of the second pass of block 1."""
    (record,) = a_run(
        a_plan((0.0, 32, 42)), a_system(mask_buffer_tokens=96), keeps_commits=True
    ).records
    assert (record.num_blocks, record.num_steps) == (2, 4 + 2)
    assert record.commit_counts == [[8, 8, 8, 8], [8, 8]]


def test_commits_are_kept_where_they_are_asked_for_only() -> None:
    assert a_run(a_plan(), a_system()).records[0].commit_counts == []


def test_a_requests_next_block_goes_before_a_younger_requests_first() -> None:
    """One prefill an iteration; blocks in order of their own arrival would end b before a."""
    plan = a_plan((0.0, 32, 64), (0.25, 32, 32), (0.5, 32, 64))
    result = a_run(plan, a_system("1C", mask_buffer_tokens=64, tau=96), commits=ONE_PASS)
    assert latencies(result.records) == [2.0, 3.0 - 0.25, 5.0 - 0.5]


def test_the_central_line_has_the_order_of_request_arrival_too() -> None:
    """Pages for one block at a time. The first block's go to who waits when they come free (a
    router releases, then asks again); then a's next block goes before c, which has waited longer.
    """
    plan = a_plan((0.0, 32, 64), (0.25, 32, 32), (0.5, 32, 64))
    system = a_system("1C", mask_buffer_tokens=64, tau=1000, total_pages=6)
    assert latencies(a_run(plan, system, commits=ONE_PASS).records) == [3.0, 1.75, 4.5]


def test_requests_of_one_moment_go_in_the_order_of_the_trace() -> None:
    plan = a_plan(*[(0.0, 32, 32)] * 12)
    assert latencies(a_run(plan, a_system("1C"), commits=ONE_PASS).records) == list(range(1, 13))


def test_a_senders_link_carries_one_transfer_at_a_time() -> None:
    """Both prefills share an iteration and move to different workers at the same moment."""
    costs = FlatCosts(transfer_latency=0.5)
    result = a_run(a_plan(), a_system("1P2D", tau=128), costs=costs)
    assert {record.placements[0][1] for record in result.records} == {"worker-1", "worker-2"}
    assert sorted(record.transfer_seconds for record in result.records) == [0.5, 1.0]


def test_a_receivers_link_takes_one_transfer_at_a_time() -> None:
    result = a_run(a_plan(), a_system("2P1D"), costs=FlatCosts(transfer_latency=0.5))
    assert {record.placements[0][0] for record in result.records} == {"worker-0", "worker-1"}
    assert sorted(record.transfer_seconds for record in result.records) == [0.5, 1.0]


def test_transfers_between_other_pairs_do_not_wait_for_each_other() -> None:
    result = a_run(a_plan(), a_system("2P2D"), costs=FlatCosts(transfer_latency=0.5))
    assert {tuple(record.placements[0]) for record in result.records} in (
        {("worker-0", "worker-2"), ("worker-1", "worker-3")},
        {("worker-0", "worker-3"), ("worker-1", "worker-2")},
    )
    assert [record.transfer_seconds for record in result.records] == [0.5, 0.5]


def test_a_transfer_takes_time_from_the_senders_next_pass() -> None:
    """The second prefill begins when the first one's KV begins to leave."""
    costs = FlatCosts(transfer_latency=0.5, transfer_busy=0.5)
    slow, fast = (
        a_world(a_plan(), a_system("1P1D"), costs=chosen).run()
        for chosen in (costs, replace(costs, transfer_busy=0.0))
    )
    on_sender = [[i.seconds for i in w.iterations if i.worker == 0] for w in (slow, fast)]
    assert on_sender == [[1.0, 1.5], [1.0, 1.0]]
    assert [w.driver.workers[0].busy_seconds for w in (slow, fast)] == [2.5, 2.0]


def test_a_transfer_takes_time_from_the_receivers_running_decodes() -> None:
    """The first block decodes from 1.5 on; the second one's KV comes from 2.5 on, amid a pass."""
    costs = FlatCosts(transfer_latency=0.5, transfer_busy=0.5, decode=0.375)
    commits = EqualCommits(4)
    world = a_world(a_plan(), a_system("1P1D"), costs=costs, commits=commits).run()
    spans = [(i.started_seconds, i.seconds) for i in world.iterations if i.worker == 1]
    assert spans[:2] == [(1.5, 0.375), (1.875, 0.375)]
    assert spans[2:4] == [(2.25, 0.375), (2.625, 0.875)]


def test_a_blocking_transfer_begins_when_the_pass_of_either_side_has_ended() -> None:
    """The first block is asked to move at 1.25, when the second prefill has begun; its KV leaves
    when that has run, though the decode worker took its part at once."""
    costs = replace(MOVING, is_blocking=True, decode=0.375)
    world = a_world(a_plan(), a_system("1P1D"), costs=costs).run()
    prefills, decodes = (
        [(i.started_seconds, i.seconds) for i in world.iterations if i.worker == worker]
        for worker in (0, 1)
    )
    assert prefills == [(0.125, 1.0), (1.125, 1.0)]
    first, second = sorted(world.records, key=lambda record: record.latency_seconds)
    assert (first.transfer_seconds, second.transfer_seconds) == (1.375, 0.875)
    # The first one's KV is whole at 2.625, amid the decode worker's part of the second transfer.
    assert decodes[0] == (2.75, 0.375)
    assert world.driver.workers[0].busy_seconds == 2 * (1.0 + 0.5)


def test_prefilled_blocks_wait_for_pages_on_a_decode_worker() -> None:
    """The decode worker holds one block of four pages; the prefill worker holds the rest."""
    system = a_system("1P1D", tau=1000, total_pages=7)
    world = a_world(a_plan((0.0, 32, 32), (0.0, 32, 32)), system).run()
    first, second = sorted(world.records, key=lambda record: record.latency_seconds)
    assert (first.decode_queueing_seconds, second.prefill_queueing_seconds) == (0.0, 1.0)

    system = a_system("2P1D", tau=1000, total_pages=7)
    first, second = sorted(
        a_world(a_plan(), system).run().records, key=lambda record: record.latency_seconds
    )
    assert (first.decode_queueing_seconds, second.decode_queueing_seconds) == (0.0, 0.75)


@pytest.mark.parametrize("split", ["1C", "2C", "1P1D", "2P1C"])
def test_one_at_a_time_means_one_request_on_a_worker_from_end_to_end(split: str) -> None:
    plan = a_plan(*[(0.25 * number, 32, 96) for number in range(9)])
    world = a_world(plan, a_system(split, is_batch_one=True, tau=10_000)).run()
    assert len(world.records) == 9
    assert {item.batch.num_sequences for item in world.iterations} == {1}


def test_one_at_a_time_requests_end_before_the_next_begins() -> None:
    """Each takes 3 s: three blocks, each completed by its prefill."""
    plan = a_plan((0.0, 32, 96), (1.0, 32, 96), (2.5, 32, 96), (20.0, 32, 96))
    system = a_system("1C", is_batch_one=True, tau=10_000)
    result = a_run(plan, system, commits=ONE_PASS)
    assert latencies(result.records) == [3.0, 5.0, 6.5, 3.0]
    assert [record.prefill_queueing_seconds for record in result.records] == [0.0, 2.0, 3.5, 0.0]


@pytest.mark.parametrize("split", ["3C", "1P2D", "2P2C", "1P1C1D"])
def test_a_latency_is_the_sum_of_its_parts(split: str) -> None:
    costs = FlatCosts(0.7, 0.013, 0.003, 0.009, 0.004, 0.002)
    plan = a_plan(*[(0.31 * number, 20 + 17 * number % 90, 1 + 29 * number) for number in range(9)])
    system = a_system(split, total_pages=40, theta_tokens=300.0)
    for record in a_run(plan, system, costs=costs).records:
        assert parts(record) == pytest.approx(record.latency_seconds, abs=1e-9)
        assert record.queueing_seconds == pytest.approx(
            record.prefill_queueing_seconds + record.decode_queueing_seconds
        )


def overloaded(split: str, **changes: Any) -> list[RequestRecord]:
    plan = a_plan(*[(0.1 * number, 32, 64) for number in range(40)])
    return a_run(plan, a_system(split, **changes)).records


def prefilled_on(records: list[RequestRecord]) -> set[str]:
    return {workers[0] for record in records for workers in record.placements}


def test_a_hybrid_overflows_under_load_only() -> None:
    overloaded_hybrid = overloaded("2P2C", theta_tokens=200.0)
    assert prefilled_on(overloaded_hybrid) == {f"worker-{number}" for number in range(4)}
    assert prefilled_on(overloaded("2P2C", theta_tokens=1e6)) == {"worker-0", "worker-1"}


def test_static_disaggregation_never_overflows() -> None:
    records = overloaded("2P2C", theta_tokens=1.0, is_overflow_allowed=False, total_pages=12)
    assert prefilled_on(records) == {"worker-0", "worker-1"}
    decoded_on = {workers[1] for record in records for workers in record.placements}
    assert decoded_on == {"worker-2", "worker-3"}


def test_a_bound_on_a_fleets_blocks_makes_new_requests_wait() -> None:
    plan = a_plan(*[(0.0, 32, 32)] * 3)
    bounded, free = (
        latencies(a_run(plan, a_system("1C", tau=1000, max_blocks_per_decoder=bound)).records)
        for bound in (1.0, 3.0)
    )
    assert bounded == [1.75, 3.5, 5.25]
    assert max(free) < bounded[1]


def test_the_admission_policy_reaches_the_workers() -> None:
    """Twelve prefills wait, and the budget is one prefill an iteration, unless it follows them."""
    plan = a_plan(*[(0.0, 32, 32)] * 12)
    most = [
        max(item.batch.num_prefills for item in a_world(plan, system).run().iterations)
        for system in (a_system("1C"), a_system("1C", admission=ADAPTIVE))
    ]
    assert most[0] == 1 < most[1]
