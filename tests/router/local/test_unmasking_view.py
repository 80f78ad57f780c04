"""The picture of an answer being unmasked, chunk by chunk."""

from typing import Any

from sangam_router.local.unmasking_view import UnmaskingView

PROMPT_TOKENS = 10


def chunk(
    content: str = "",
    *,
    settled: int = 0,
    commits: tuple[tuple[int, str], ...] = (),
    block: int = 0,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    denoising = [
        {"block": block, "step": 0, "position": PROMPT_TOKENS + p, "token": 1, "text": text}
        for p, text in commits
    ]
    choice = {"delta": {"content": content}, "finish_reason": finish_reason, "denoising": denoising}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": settled}
    return {"choices": [choice], "usage": usage}


def test_tokens_appear_in_place_before_they_settle() -> None:
    view = UnmaskingView()
    assert view.take(chunk(commits=((1, "b"), (3, "d")))) == ""
    assert view.render().plain.startswith("·b·d····")
    assert len(view.render().plain) == 32


def test_settled_text_stands_before_the_cells_that_follow_it() -> None:
    view = UnmaskingView()
    view.take(chunk(commits=((2, "c"),)))
    assert view.take(chunk("ab", settled=2, commits=((0, "a"), (1, "b")))) == "ab"
    assert view.render().plain == "abc" + "·" * 29
    assert view.num_tokens == 2


def test_nothing_is_shown_behind_the_end_of_the_answer() -> None:
    view = UnmaskingView()
    view.take(chunk(commits=((0, "4"), (2, "<|endoftext|>"), (3, "<|endoftext|>"))))
    assert view.render().plain == "4·▪"


def test_the_next_block_adds_its_masks_when_it_starts() -> None:
    view = UnmaskingView()
    view.take(chunk("x" * 32, settled=32, commits=((0, "x"),)))
    view.take(chunk(settled=32, commits=((33, "y"),), block=1))
    assert view.render().plain == "x" * 32 + "·y" + "·" * 30


def test_a_finished_answer_is_its_text_alone() -> None:
    view = UnmaskingView()
    view.take(chunk("42", settled=2, commits=((0, "4"), (1, "2")), finish_reason="stop"))
    assert view.render().plain == "42"
    assert view.finish_reason == "stop"


def test_an_unsettled_line_break_keeps_the_cells_on_one_line() -> None:
    view = UnmaskingView()
    view.take(chunk(commits=((1, "\n"),)))
    assert "\n" not in view.render().plain
