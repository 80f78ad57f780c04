"""The last places of a batch, and the most that a restart may carry."""

from tests.worker.scheduler_states import a_scheduler, a_state, arriving, key, names, ran

from sangam_core.decoding import Resume


def test_the_last_places_of_a_batch_are_a_waiting_prefill_s_not_a_younger_decode_s() -> None:
    scheduler = a_scheduler(tau_tokens=1000, max_batch_blocks=4)  # share: three blocks
    for number in range(3):
        assert scheduler.reserve(arriving(f"running{number}"))
        scheduler.arrived(key(f"running{number}"))
    ran(scheduler, scheduler.next_plan())
    scheduler.submit(a_state("prefill", arrival=1.0))
    assert scheduler.reserve(arriving("young", arrival=2.0))
    scheduler.arrived(key("young"))
    assert names(scheduler.next_plan()) == ["running0", "running1", "running2", "prefill"]


def test_a_restart_may_carry_as_much_as_its_block_is_long() -> None:
    state = a_state(resume=Resume(step=1, initial_masks=8, carry=8.0))
    assert state.resume is not None
    assert state.resume.carry == 8.0
