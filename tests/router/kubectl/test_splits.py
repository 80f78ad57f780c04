"""What may be asked of rebalance, and how the rest is refused."""

import pytest

from sangam_router.kubectl.splits import Split, SplitImpossible, parse_split


def test_roles_that_are_not_named_get_nobody() -> None:
    assert parse_split(["prefill=4", "colocated=4"]) == Split(prefill=4, colocated=4)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["prefil=4", "colocated=4"], "did you mean prefill?"),
        (["router=2"], "there are prefill, decode, colocated"),
        (["prefill"], "write ROLE=COUNT"),
        (["prefill=-1", "colocated=2"], "a whole number, 0 or more"),
        (["prefill=1.5", "colocated=2"], "a whole number"),
        (["prefill=²", "colocated=2"], "a whole number"),
        (["prefill=", "colocated=2"], "a whole number"),
        (["prefill=1", "prefill=2"], "given twice"),
        (["prefill=8"], "nobody would decode"),
        (["decode=8"], "nobody would prefill"),
        (["prefill=0", "colocated=0"], "nobody would decode"),
    ],
)
def test_what_could_never_serve_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(SplitImpossible) as refused:
        parse_split(words)
    assert text in str(refused.value)
