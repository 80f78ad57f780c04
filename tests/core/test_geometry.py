"""Block positions, token costs and page counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sangam_core.geometry import PAGE_TOKENS, Geometry

GEOMETRIES = st.builds(
    Geometry,
    prompt_tokens=st.integers(0, 5000),
    num_blocks=st.integers(1, 40),
    block_length=st.integers(1, 64),
)


@given(GEOMETRIES)
def test_the_blocks_tile_the_mask_buffer(geometry: Geometry) -> None:
    positions = [p for block in range(geometry.num_blocks) for p in geometry.block_range(block)]
    assert positions == list(range(geometry.prompt_tokens, geometry.total_tokens))
    assert len(positions) == geometry.mask_buffer_tokens


@given(GEOMETRIES)
def test_the_pages_hold_the_sequence_and_none_is_spare(geometry: Geometry) -> None:
    assert geometry.num_pages * PAGE_TOKENS >= geometry.total_tokens
    assert (geometry.num_pages - 1) * PAGE_TOKENS < geometry.total_tokens


@given(GEOMETRIES, st.data())
def test_a_block_stops_where_the_next_one_starts(geometry: Geometry, data: st.DataObject) -> None:
    block = data.draw(st.integers(0, geometry.num_blocks - 1))
    assert geometry.block_range(block).stop == geometry.block_stop(block)
    if block + 1 < geometry.num_blocks:
        assert geometry.block_stop(block) == geometry.block_start(block + 1)


@given(st.integers(0, 100), st.integers(1, 2000), st.integers(1, 64))
def test_an_answer_is_rounded_up_to_whole_blocks(prompt: int, wanted: int, length: int) -> None:
    geometry = Geometry.for_answer(prompt, wanted, length)
    assert wanted <= geometry.mask_buffer_tokens < wanted + length
    assert geometry.prompt_tokens == prompt


def test_a_prefill_costs_the_prompt_and_the_whole_mask_buffer() -> None:
    geometry = Geometry.for_answer(prompt_tokens=100, max_tokens=33)
    assert (geometry.mask_buffer_tokens, geometry.total_tokens, geometry.num_pages) == (64, 164, 11)


@pytest.mark.parametrize(
    ("prompt_tokens", "num_blocks", "block_length", "field"),
    [(-1, 1, 32, "prompt_tokens"), (0, 0, 32, "num_blocks"), (0, 1, 0, "block_length")],
)
def test_an_empty_part_is_refused_by_name(
    prompt_tokens: int, num_blocks: int, block_length: int, field: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        Geometry(prompt_tokens, num_blocks, block_length)


@pytest.mark.parametrize(
    ("max_tokens", "block_length", "field"),
    [(0, 32, "num_blocks"), (-5, 32, "num_blocks"), (8, 0, "block_length")],
)
def test_an_answer_of_nothing_is_refused_by_name(
    max_tokens: int, block_length: int, field: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        Geometry.for_answer(1, max_tokens, block_length)


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_that_is_not_there_is_refused(block: int) -> None:
    geometry = Geometry(10, 3)
    with pytest.raises(ValueError, match=r"is not in 0\.\.2"):
        geometry.block_range(block)
