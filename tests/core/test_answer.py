"""When a block and an answer are complete, against a plain reading of the rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sangam_core.answer import Completion, completion

MASK, EOS, OTHER_EOS, WORD = 9, 2, 3, 5
ENDS = (EOS, OTHER_EOS)
SEQUENCES = st.lists(st.sampled_from([MASK, EOS, OTHER_EOS, WORD]), min_size=1, max_size=12)


@given(SEQUENCES, st.data())
def test_an_answer_is_complete_exactly_when_its_block_holds_a_settled_eos(
    ids: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    done = completion(ids, range(start, stop), MASK, ENDS)
    is_settled = any(
        ids[position] in ENDS and MASK not in ids[start:position] for position in range(start, stop)
    )
    if is_settled:
        assert done is Completion.ANSWER
    elif MASK in ids[start:stop]:
        assert done is Completion.NOTHING
    else:
        assert done is Completion.BLOCK


@pytest.mark.parametrize(
    ("ids", "done"),
    [
        ([WORD, MASK, WORD, WORD], Completion.NOTHING),
        ([WORD, WORD, WORD, WORD], Completion.BLOCK),
        ([WORD, EOS, MASK, MASK], Completion.ANSWER),
        ([WORD, OTHER_EOS, WORD, WORD], Completion.ANSWER),
        ([MASK, EOS, WORD, WORD], Completion.NOTHING),
        ([MASK, MASK, MASK, MASK], Completion.NOTHING),
    ],
)
def test_a_block_of_four(ids: list[int], done: Completion) -> None:
    assert completion(ids, range(4), MASK, ENDS) is done


def test_an_eos_in_the_prompt_or_behind_the_block_ends_nothing() -> None:
    assert completion([EOS, WORD, WORD, EOS], range(1, 3), MASK, ENDS) is Completion.BLOCK


def test_an_ignored_eos_is_a_word_like_any_other() -> None:
    assert completion([EOS, MASK], range(2), MASK, ()) is Completion.NOTHING
    assert completion([EOS, EOS], range(2), MASK, ()) is Completion.BLOCK
