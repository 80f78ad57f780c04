"""Who runs in an iteration: arrival order, the deficit budget, pages, shares, the largest batch."""

from tests.worker.scheduler_states import (
    MASK,
    SOURCE,
    a_scheduler,
    a_state,
    arriving,
    key,
    names,
    ran,
)

from sangam_core.answer import Completion
from sangam_core.decoding import Resume
from sangam_worker.block_state import Stage


def test_prefills_run_in_request_arrival_order_then_by_id() -> None:
    scheduler = a_scheduler(tau_tokens=16)
    for name, arrival in (("c", 2.0), ("b", 1.0), ("d", 2.0), ("a", 3.0)):
        scheduler.submit(a_state(name, arrival=arrival))
    order = []
    while not scheduler.is_empty:
        plan = scheduler.next_plan()
        assert plan is not None
        order += [item.key.request_id for item in plan.passes if item.is_whole_sequence]
        ran(scheduler, plan, 8)
    assert order == ["b", "c", "d", "a"]


def test_a_later_block_keeps_its_requests_place_in_the_line() -> None:
    scheduler = a_scheduler(tau_tokens=16)
    scheduler.submit(a_state("young", arrival=5.0))
    ids = [5] * 8 + [6] * 8 + [MASK] * 8
    scheduler.submit(a_state("old", arrival=1.0, num_blocks=2, block=1, ids=ids))
    assert names(scheduler.next_plan()) == ["old"]


def test_a_small_prefill_does_not_overtake_a_large_one_that_waits_for_budget() -> None:
    scheduler = a_scheduler(tau_tokens=30)
    scheduler.submit(a_state("running"))
    ran(scheduler, scheduler.next_plan())
    scheduler.submit(a_state("large", arrival=1.0, prompt_tokens=40))
    scheduler.submit(a_state("small", arrival=2.0, prompt_tokens=0))
    assert names(scheduler.next_plan()) == ["running"]


def test_a_large_prefill_is_admitted_when_its_deficit_has_built_up() -> None:
    scheduler = a_scheduler(tau_tokens=30)
    scheduler.submit(a_state("running", prompt_tokens=0))
    ran(scheduler, scheduler.next_plan())
    scheduler.submit(a_state("large", arrival=1.0, prompt_tokens=52))
    seen = []
    for _ in range(3):
        plan = scheduler.next_plan()
        seen.append(names(plan))
        ran(scheduler, plan)
    assert seen == [["running"], ["running"], ["running", "large"]]  # 22, 44, 66 >= 60


def test_a_head_without_pages_blocks_the_line_until_some_come_free() -> None:
    scheduler = a_scheduler(total_pages=4, tau_tokens=1000)
    scheduler.submit(a_state("a", prompt_tokens=40))
    ran(scheduler, scheduler.next_plan(), 7)
    scheduler.submit(a_state("b", arrival=1.0, prompt_tokens=40))
    scheduler.submit(a_state("c", arrival=2.0))
    plan = scheduler.next_plan()
    assert names(plan) == ["a"]
    ran(scheduler, plan)
    assert names(scheduler.next_plan()) == ["b", "c"]


# -- transfers -------------------------------------------------------------------------------


def test_a_prefilled_block_holds_its_pages_until_it_is_released() -> None:
    scheduler = a_scheduler(total_pages=2)
    scheduler.submit(a_state(hands_over=True))
    progress = ran(scheduler, scheduler.next_plan())["a"]
    assert progress.stage is Stage.HOLDING
    assert (scheduler.next_plan(), scheduler.pages_of(key("a"))) == (None, (0,))
    assert scheduler.remove(key("a"))
    assert scheduler.pages.num_free == 2


def test_a_block_that_its_prefill_completes_is_not_held() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_state(hands_over=True))
    progress = ran(scheduler, scheduler.next_plan(), 8)["a"]
    assert (progress.completion, progress.stage) == (Completion.BLOCK, None)
    assert scheduler.is_empty


def test_a_fetched_block_decodes_only_once_its_kv_is_here() -> None:
    scheduler = a_scheduler(total_pages=3)
    state = arriving()
    assert scheduler.reserve(state)
    assert (state.stage, scheduler.pages.num_free) == (Stage.ARRIVING, 2)
    assert scheduler.next_plan() is None
    scheduler.arrived(key("a"))
    plan = scheduler.next_plan()
    assert plan is not None
    assert (plan.passes[0].step, plan.passes[0].masked) == (1, tuple(range(9, 16)))


def test_a_reservation_without_room_holds_nothing() -> None:
    scheduler = a_scheduler(total_pages=1)
    assert scheduler.reserve(arriving("a"))
    assert not scheduler.reserve(arriving("b"))
    assert scheduler.keys() == (key("a"),)


def test_a_younger_transferred_decode_waits_beyond_its_share_while_a_prefill_waits() -> None:
    scheduler = a_scheduler(tau_tokens=16)  # share: 12 tokens, one decode of 8
    assert scheduler.reserve(arriving("running", arrival=0.0))
    scheduler.arrived(key("running"))
    ran(scheduler, scheduler.next_plan())
    scheduler.submit(a_state("prefill", arrival=1.0, prompt_tokens=52))
    young = arriving("young", arrival=2.0)
    for state in (young, arriving("old", arrival=0.5)):
        assert scheduler.reserve(state)
        scheduler.arrived(state.key)
    plan = scheduler.next_plan()
    assert names(plan) == ["running", "old"]
    assert young.stage is Stage.PARKED
    ran(scheduler, plan)
    scheduler.remove(key("prefill"))
    assert names(scheduler.next_plan()) == ["running", "old", "young"]


def test_a_transferred_decode_that_fills_its_share_exactly_still_joins() -> None:
    scheduler = a_scheduler(tau_tokens=32)  # share: 24 tokens, three decodes of 8
    for number in range(2):
        assert scheduler.reserve(arriving(f"running{number}"))
        scheduler.arrived(key(f"running{number}"))
    ran(scheduler, scheduler.next_plan())
    scheduler.submit(a_state("prefill", arrival=1.0, prompt_tokens=80))
    for number in range(2):
        assert scheduler.reserve(arriving(f"young{number}", arrival=2.0 + number))
        scheduler.arrived(key(f"young{number}"))
    assert names(scheduler.next_plan()) == ["running0", "running1", "young0"]


def test_a_waiting_prefill_that_takes_the_last_free_pages_goes_before_a_younger_decode() -> None:
    """The decode alone is over its share: it waits while the idle rule can admit the prefill."""
    scheduler = a_scheduler(total_pages=2, tau_tokens=8)
    scheduler.submit(a_state("prefill", arrival=1.0))
    assert scheduler.reserve(arriving("young", arrival=2.0))
    scheduler.arrived(key("young"))
    assert names(scheduler.next_plan()) == ["prefill"]


def test_a_waiting_prefill_without_pages_does_not_keep_an_idle_worker_from_a_decode() -> None:
    scheduler = a_scheduler(total_pages=1, tau_tokens=8)
    scheduler.submit(a_state("prefill", arrival=1.0))
    assert scheduler.reserve(arriving("young", arrival=2.0))
    scheduler.arrived(key("young"))
    assert names(scheduler.next_plan()) == ["young"]


def test_parked_decodes_join_at_once_when_no_prefill_waits() -> None:
    scheduler = a_scheduler(tau_tokens=16)
    for number in range(6):
        assert scheduler.reserve(arriving(str(number)))
        scheduler.arrived(key(str(number)))
    plan = scheduler.next_plan()
    assert plan is not None
    assert plan.num_decode_tokens == 48


def test_an_adaptive_budget_counts_what_waits_and_forgets_what_has_gone() -> None:
    fixed = a_scheduler(tau_tokens=16)
    adaptive = a_scheduler(tau_tokens=16, admission="adaptive")
    for scheduler in (fixed, adaptive):
        scheduler.submit(a_state("old"))
        ran(scheduler, scheduler.next_plan())
        for number in range(20):
            scheduler.submit(a_state(f"w{number:02}", arrival=1.0 + number))
    # Of 16 each: tau is 16 and, adaptive, 20 * 16 / 8 more; the decode takes 8 of it.
    assert names(fixed.next_plan()) == ["old"]
    plan = adaptive.next_plan()
    assert names(plan) == ["old", "w00", "w01", "w02"]
    ran(adaptive, plan)
    for number in range(3, 20):
        adaptive.remove(key(f"w{number:02}"))
    for name in ("w00", "w01", "w02"):
        adaptive.remove(key(name))
    adaptive.submit(a_state("last", arrival=99.0))
    adaptive.carried_tokens = 0
    # Nothing is left of what waited: 16 + 16 / 8 less 8 for the decode are too few for it.
    assert names(adaptive.next_plan()) == ["old"]


# -- the bound on an iteration ----------------------------------------------------------------


def test_a_full_batch_holds_prefills_back_until_a_block_has_left() -> None:
    scheduler = a_scheduler(max_batch_blocks=2)
    for number in range(3):
        scheduler.submit(a_state(f"r{number}", arrival=number))
    first = scheduler.next_plan()
    assert names(first) == ["r0", "r1"]
    ran(scheduler, first, {"r0": {8: 6}, "r1": {8: 6}})
    second = scheduler.next_plan()
    assert names(second) == ["r0", "r1"]
    ran(scheduler, second, {"r0": dict.fromkeys(range(9, 16), 6), "r1": {9: 6}})
    assert names(scheduler.next_plan()) == ["r1", "r2"]


def test_waiting_for_room_in_the_batch_earns_no_credit() -> None:
    scheduler = a_scheduler(max_batch_blocks=1)
    for number in range(2):
        scheduler.submit(a_state(f"r{number}", arrival=number))
    carried = []
    for _ in range(3):
        ran(scheduler, scheduler.next_plan(), {"r0": {}})
        carried.append(scheduler.carried_tokens)
    assert carried == [0, 0, 0]


def test_transferred_decodes_join_a_full_batch_only_when_a_block_has_left() -> None:
    scheduler = a_scheduler(max_batch_blocks=1)
    for number in range(2):
        state = arriving(f"r{number}", arrival=number, num_left=2)
        assert scheduler.reserve(state)
        scheduler.arrived(state.key)
    first = scheduler.next_plan()
    assert names(first) == ["r0"]
    ran(scheduler, first, 2)
    assert names(scheduler.next_plan()) == ["r1"]


def test_transferred_decodes_that_feed_many_rows_join_only_as_far_as_memory_goes() -> None:
    """With the prefix cache each of these feeds four blocks' rows."""
    scheduler = a_scheduler(max_batch_rows=70)
    ids, resume = [5] * 8 + [6] * 7 + [MASK] * 25, Resume(step=1, initial_masks=8)
    for number in range(3):
        state = a_state(
            f"r{number}",
            arrival=number,
            num_blocks=4,
            cache="prefix",
            ids=ids,
            source=SOURCE,
            resume=resume,
        )
        assert scheduler.reserve(state)
        scheduler.arrived(state.key)
    first = scheduler.next_plan()
    assert first is not None
    assert (names(first), first.num_decode_tokens) == (["r0", "r1"], 64)
    ran(scheduler, first, 1)
    assert names(scheduler.next_plan()) == ["r2"]
