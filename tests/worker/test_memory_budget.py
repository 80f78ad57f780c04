"""What a GPU's memory is spent on: who gets how much, and what is said when it does not fit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sangam_core.errors import ConfigurationError
from sangam_worker.memory_budget import DeviceMemory, MemoryNeeds, PoolWish, settle

GB = 10**9
H200 = DeviceMemory(total_bytes=141 * GB, used_bytes=GB // 2)
NEEDS = MemoryNeeds(
    weights_bytes=16 * GB, activations_bytes=3 * GB, graphs_bytes=GB, transfers_bytes=GB // 2
)
POOL = PoolWish(page_bytes=8 * 2**20, total_pages=None, longest_tokens=4096)


def test_the_pool_takes_what_is_left_of_the_share() -> None:
    budget = settle(H200, NEEDS, POOL, 0.9)
    spent = H200.used_bytes + NEEDS.total_bytes + budget.total_pages * POOL.page_bytes
    assert 0 <= 0.9 * H200.total_bytes - spent < POOL.page_bytes
    assert budget.left_bytes == H200.total_bytes - spent


def test_pages_that_are_asked_for_are_given_and_no_more() -> None:
    budget = settle(H200, NEEDS, replace(POOL, total_pages=100), 0.9)
    assert budget.total_pages == 100
    assert budget.left_bytes > 100 * GB


def test_the_line_tells_the_whole_memory() -> None:
    line = settle(H200, NEEDS, replace(POOL, total_pages=12273), 0.95).line()
    assert line == (
        "GPU memory 141.0 GB: in use before 0.5, weights 16.0, graphs 1.0, activations 3.0, "
        "transfers 0.5, KV pool 103.0 (12,273 pages = 196k tokens), left 17.0"
    )


def test_the_line_leaves_out_what_there_is_not() -> None:
    line = settle(H200, MemoryNeeds(weights_bytes=GB, activations_bytes=GB), POOL, 0.9).line()
    assert "graphs" not in line
    assert "transfers" not in line


def test_the_line_can_say_what_was_measured() -> None:
    budget = settle(H200, NEEDS, POOL, 0.9)
    measured = budget.taking(replace(NEEDS, graphs_bytes=2 * GB))
    assert measured.total_pages == budget.total_pages
    assert measured.left_bytes == budget.left_bytes - GB
    assert "graphs 2.0" in measured.line()


def problem(
    memory: DeviceMemory = H200,
    needs: MemoryNeeds = NEEDS,
    pool: PoolWish = POOL,
    utilization: float = 0.9,
) -> str:
    with pytest.raises(ConfigurationError) as refused:
        settle(memory, needs, pool, utilization)
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_too_many_pages_are_refused_with_how_many_would_do() -> None:
    said = problem(pool=replace(POOL, total_pages=20_000))
    assert said.startswith("SANGAM_TOTAL_PAGES or SANGAM_POOL_BYTES: 20,000 pages are 167.8 GB")
    most = settle(H200, NEEDS, POOL, 0.9).total_pages
    assert said.endswith(f"ask for at most {most:,} pages")
    assert settle(H200, NEEDS, replace(POOL, total_pages=most), 0.9).total_pages == most


def test_weights_that_are_too_large_for_the_gpu_are_told_apart_from_a_gpu_that_is_taken() -> None:
    small = DeviceMemory(total_bytes=16 * GB, used_bytes=GB // 2)
    assert problem(small).endswith("the weights alone are too large for this GPU")
    taken = DeviceMemory(total_bytes=141 * GB, used_bytes=120 * GB)
    assert problem(taken).endswith("raise SANGAM_GPU_MEMORY_UTILIZATION")
    assert "end what else uses this GPU" in problem(taken)


def test_activations_that_leave_no_room_name_the_settings_that_shrink_them() -> None:
    said = problem(needs=replace(NEEDS, activations_bytes=110 * GB))
    for words in ("110.0 of activations", "SANGAM_MAX_SEQUENCE_TOKENS", "0.9 of 141.0 GB"):
        assert words in said


def test_a_pool_of_what_is_left_must_hold_one_longest_sequence() -> None:
    tight = replace(
        NEEDS, activations_bytes=int(0.9 * 141 * GB) - GB // 2 - 17 * GB - GB // 2 - 2 * GB
    )
    assert settle(H200, tight, replace(POOL, longest_tokens=3600), 0.9).total_pages >= 225
    assert "one sequence of 4,096 tokens" in problem(needs=tight)


def test_a_page_that_the_longest_sequence_only_begins_counts() -> None:
    """Exactly 256 pages are left: 4,096 tokens, and not one more."""
    memory = DeviceMemory(total_bytes=10 * GB + 256 * POOL.page_bytes, used_bytes=0)
    needs = MemoryNeeds(weights_bytes=6 * GB, activations_bytes=4 * GB)
    assert settle(memory, needs, replace(POOL, longest_tokens=4096), 1.0).total_pages == 256
    said = problem(memory, needs, replace(POOL, longest_tokens=4097), 1.0)
    assert "one sequence of 4,097 tokens" in said


@given(
    total=st.integers(10**9, 2 * 10**11),
    used=st.integers(0, 10**10),
    weights=st.integers(0, 10**11),
    activations=st.integers(0, 10**11),
    page_bytes=st.integers(1, 10**8),
    pages=st.none() | st.integers(1, 10**5),
    utilization=st.floats(0.01, 1.0),
)
def test_what_is_settled_fits_the_share(
    total: int,
    used: int,
    weights: int,
    activations: int,
    page_bytes: int,
    pages: int | None,
    utilization: float,
) -> None:
    memory, needs = DeviceMemory(total, used), MemoryNeeds(weights, activations)
    wish = PoolWish(page_bytes, pages, longest_tokens=160)
    try:
        budget = settle(memory, needs, wish, utilization)
    except ConfigurationError:
        asked = (pages or 10) * page_bytes
        assert used + needs.total_bytes + asked > int(total * utilization)
        return
    assert budget.total_pages >= (pages or 10)
    assert used + needs.total_bytes + budget.total_pages * page_bytes <= int(total * utilization)
    assert budget.left_bytes >= 0
