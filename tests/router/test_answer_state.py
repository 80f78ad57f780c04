"""An answer as it fills: what has settled, when it is over, what a restart needs."""

import pytest
from tests.router.builders import job

from sangam_core.decoding import Commit, Decoding, EosRule
from sangam_core.errors import BlockLost
from sangam_core.wire import PassRan
from sangam_router.answer_state import AnswerState

MASK, EOS = 261, 257
NUM_PROMPT = 2


def state(max_tokens: int = 64, **changes: object) -> AnswerState:
    def decode(ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode()

    return AnswerState(job(max_tokens=max_tokens, **changes), MASK, decode)


def ran(step: int, tokens: dict[int, int | str], carry: float = 0.0) -> PassRan:
    """A pass; positions count from the answer's start."""
    commits = [
        Commit(position=NUM_PROMPT + p, token=t if isinstance(t, int) else ord(t), confidence=0.9)
        for p, t in tokens.items()
    ]
    return PassRan(step=step, commits=tuple(commits), carry=carry)


def test_text_grows_only_up_to_the_first_mask() -> None:
    answer = state()
    assert answer.apply(ran(0, {0: "a", 2: "c"})).text == "a"
    assert answer.apply(ran(1, {1: "b"})).text == "bc"
    assert answer.num_tokens == 3


def test_an_end_token_counts_once_nothing_is_masked_before_it() -> None:
    answer = state()
    assert answer.apply(ran(0, {0: "a", 2: EOS, 3: "x"})).text == "a"
    assert answer.finish_reason is None
    answer.apply(ran(1, {1: "b"}))
    assert answer.finish_reason == "stop"
    assert answer.num_tokens == 2


def test_an_ignored_end_token_is_a_token_without_text() -> None:
    answer = state(3, decoding=Decoding(eos_ids=(EOS,), eos_rule=EosRule.IGNORE))
    delta = answer.apply(ran(0, {0: "a", 1: EOS, 2: "b"}))
    assert (delta.text, delta.num_tokens) == ("ab", 3)
    assert answer.finish_reason == "length"


def test_an_end_token_just_behind_max_tokens_does_not_count() -> None:
    answer = state(2)
    answer.apply(ran(0, {0: "a", 1: "b", 2: EOS}))
    assert answer.finish_reason == "length"


def test_a_stop_string_wins_over_the_length() -> None:
    answer = state(2, stops=("b",))
    assert answer.apply(ran(0, {0: "a", 1: "b"})).text == "a"
    assert answer.finish_reason == "stop"


def test_a_held_back_piece_of_a_stop_string_comes_with_the_end() -> None:
    answer = state(2, stops=("bc",))
    assert answer.apply(ran(0, {0: "a", 1: "b"})).text == "ab"
    assert answer.finish_reason == "length"


def test_a_block_restarts_from_masks_with_its_commits_beside_it() -> None:
    answer = state()
    answer.apply(ran(0, dict.fromkeys(range(32), "a")))
    answer.next_block(1)
    assert answer.restart() is None
    answer.apply(ran(0, {33: "b"}, carry=0.5))
    resume = answer.restart()
    assert resume is not None
    assert (resume.step, resume.initial_masks, resume.carry) == (1, 32, 0.5)
    assert [commit.position for commit in resume.commits] == [NUM_PROMPT + 33]
    ids = answer.ids_at_block_start()
    assert ids[NUM_PROMPT : NUM_PROMPT + 32] == (ord("a"),) * 32
    assert set(ids[NUM_PROMPT + 32 :]) == {MASK}
    assert answer.moved().commits == ()
    assert answer.ids[NUM_PROMPT + 33] == ord("b")


@pytest.mark.parametrize(
    ("step", "tokens"),
    [
        (1, {1: "a"}),  # a pass is missing
        (0, {32: "a"}),  # in the next block
        (0, {0: MASK}),  # no token
        (0, {0: -1}),
        (0, {0: 2**32}),  # no tokenizer takes it
    ],
)
def test_a_pass_that_cannot_be_is_not_believed(step: int, tokens: dict[int, int | str]) -> None:
    with pytest.raises(BlockLost):
        state().apply(ran(step, tokens))


@pytest.mark.parametrize("bad", [(1, "x"), (32, "x"), (2, MASK)])
def test_a_pass_that_is_not_believed_leaves_nothing_behind(bad: tuple[int, int | str]) -> None:
    """The block starts again elsewhere, and what comes from there must find masks."""
    answer = state()
    answer.apply(ran(0, {0: "a"}))
    before = [*answer.ids]
    commits = (*ran(1, {1: "b"}).commits, *ran(1, dict([bad])).commits)
    with pytest.raises(BlockLost):
        answer.apply(PassRan(step=1, commits=commits, carry=0.0))
    assert answer.ids == before
    assert answer.apply(ran(1, {1: "b", 2: "c"})).text == "bc"


def test_a_commit_is_never_revised() -> None:
    answer = state()
    answer.apply(ran(0, {0: "a"}))
    with pytest.raises(BlockLost):
        answer.apply(ran(1, {0: "b"}))
