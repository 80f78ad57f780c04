"""Where a pass's keys and values lie, at the edges of pages."""

import pytest
from tests.worker.requests import a_pass

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.packing import pack
from sangam_worker.plan import Pass


def a_decode(length: int, num_pages: int) -> Pass:
    """A pass over the last 8 positions of a cached sequence, which sees all of it."""
    rows = range(length - 8, length)
    pages = tuple(range(10, 10 + num_pages))
    return a_pass([5] * length, rows=rows, pages=pages, block=rows, masked=rows)


@pytest.mark.parametrize(
    ("length", "num_pages", "last"), [(31, 2, 15), (32, 2, 16), (33, 3, 1), (48, 3, 16)]
)
def test_the_last_page_holds_what_is_left_or_is_full(
    length: int, num_pages: int, last: int
) -> None:
    layout = pack([a_decode(length, num_pages)], "llada").layout
    assert layout.kv_page_indices.tolist() == list(range(10, 10 + num_pages))
    assert layout.kv_last_page_lengths.tolist() == [last]
    seen = PAGE_TOKENS * (len(layout.kv_page_indices) - 1) + last
    assert layout.kv_lengths.tolist() == [seen] == [length]


def test_pages_behind_what_a_pass_sees_are_not_read() -> None:
    layout = pack([a_decode(32, 5), a_decode(33, 5)], "llada").layout
    assert layout.kv_page_indices.tolist() == [10, 11, 10, 11, 12]
    assert layout.kv_page_indptr.tolist() == [0, 2, 5]


@pytest.mark.parametrize("length", [24, 31, 32, 40])
def test_rows_are_kept_at_their_positions_slots(length: int) -> None:
    layout = pack([a_decode(length, 3)], "llada").layout
    expected = [10 * PAGE_TOKENS + position for position in range(length - 8, length)]
    assert layout.write_slots.tolist() == expected
    assert layout.write_rows.tolist() == list(range(8))
