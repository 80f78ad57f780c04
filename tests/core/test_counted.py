"""Singular and plural."""

import pytest

from sangam_core.counted import counted


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 passes"), (1, "1 pass"), (2, "2 passes"), (21, "21 passes")]
)
def test_one_is_one_and_everything_else_is_many(number: int, told: str) -> None:
    assert counted(number, "pass", "passes") == told


def test_a_plural_is_made_with_an_s() -> None:
    assert (counted(1, "token"), counted(2, "token")) == ("1 token", "2 tokens")
