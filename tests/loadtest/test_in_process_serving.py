"""The closed loop keeps the asked-for number of requests in flight and answers each of them."""

from benchmarks.in_process import ClosedLoop
from sangam_core.decoding import Commit, Decoding, EosRule
from sangam_worker.plan import Outcome, PassOutcome, Plan
from sangam_worker.scheduler import Scheduler

MASK, EOS, VOCAB = 9, 8, 10


class HalfABlockAPass:
    """Commits the lower half of a pass's masks (at least one), each as the token asked for."""

    def __init__(self, token: int = 5, eos_at: int | None = None) -> None:
        self.token, self.eos_at = token, eos_at
        self.passes_per_plan: list[int] = []

    def execute(self, plan: Plan) -> Outcome:
        self.passes_per_plan.append(len(plan.passes))
        outcomes = []
        for item in plan.passes:
            chosen = item.masked[: max(1, len(item.masked) // 2)]
            commits = tuple(
                Commit(position=p, token=EOS if p == self.eos_at else self.token) for p in chosen
            )
            outcomes.append(PassOutcome(item.key, commits))
        return Outcome(plan.iteration, tuple(outcomes))


def loop_over(
    engine: HalfABlockAPass, *, decoding: Decoding | None = None, total_pages: int = 64
) -> ClosedLoop:
    return ClosedLoop(
        engine,
        Scheduler(mask_id=MASK, total_pages=total_pages, tau_tokens=1024),
        mask_id=MASK,
        vocab_size=VOCAB,
        num_blocks=2,
        block_length=4,
        decoding=decoding or Decoding(eos_rule=EosRule.IGNORE),
    )


def test_every_prompt_is_answered_in_order_block_by_block() -> None:
    engine = HalfABlockAPass()
    served = loop_over(engine).serve([[1], [2, 3], [4]], concurrency=2)
    assert [answer.ids for answer in served] == [[1] + [5] * 8, [2, 3] + [5] * 8, [4] + [5] * 8]
    assert [answer.num_passes for answer in served] == [6, 6, 6]


def test_one_request_at_a_time_is_one_pass_an_iteration() -> None:
    engine = HalfABlockAPass()
    loop_over(engine).serve([[1], [2], [3]], concurrency=1)
    assert engine.passes_per_plan == [1] * 18


def test_two_at_a_time_share_their_iterations() -> None:
    engine = HalfABlockAPass()
    loop_over(engine).serve([[1], [2], [3], [4]], concurrency=2)
    assert engine.passes_per_plan == [2] * 12


def test_a_settled_eos_ends_a_request_and_its_later_blocks_never_run() -> None:
    engine = HalfABlockAPass(eos_at=2)
    served = loop_over(engine, decoding=Decoding(eos_ids=(EOS,))).serve([[1]], concurrency=1)
    assert served[0].ids[:3] == [1, 5, EOS]
    assert served[0].num_passes == 1


def test_requests_wait_for_pages_rather_than_fail() -> None:
    engine = HalfABlockAPass()
    served = loop_over(engine, total_pages=2).serve([[1], [2], [3]], concurrency=3)
    assert [answer.ids[0] for answer in served] == [1, 2, 3]
    assert max(engine.passes_per_plan) == 2
