"""The pool's pages come out as they went in, and say how many bytes they are."""

import pytest
import torch

from sangam_worker.kv_pool import KVPool
from sangam_worker.pages import PageAllocator


def a_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(num_layers=3, total_pages=10, num_kv_heads=2, head_dim=8, dtype=dtype)


def test_pages_move_between_pools_in_any_order() -> None:
    source, target = a_pool(), a_pool()
    for layer in source.layers:
        layer.normal_()
    sent, received = (7, 2, 9), (0, 5, 1)
    for layer in range(source.num_layers):
        target.scatter(layer, received, source.gather(layer, sent))
    for layer in range(source.num_layers):
        assert torch.equal(target.gather(layer, received), source.gather(layer, sent))
        untouched = [page for page in range(10) if page not in received]
        assert target.gather(layer, untouched).abs().max() == 0


def test_gathered_pages_are_a_contiguous_copy() -> None:
    pool = a_pool()
    pages = pool.gather(1, [3, 4])
    assert (tuple(pages.shape), pages.is_contiguous()) == ((2, 2, 16, 2, 8), True)
    pages.fill_(5)
    assert pool.layers[1].abs().max() == 0


def test_the_scratch_page_lies_behind_the_pages_and_is_none_of_them() -> None:
    pool = a_pool()
    assert (len(pool.layers[0]), pool.scratch_page) == (10, 10)
    for with_scratch, layer in zip(pool.layers_and_scratch, pool.layers, strict=True):
        with_scratch[pool.scratch_page].fill_(7)
        assert layer.abs().max() == 0
        layer.fill_(3)
        assert (with_scratch[:10] == 3).all(), "the same memory"


def test_bytes_of_a_page_count_every_layer() -> None:
    assert a_pool().bytes_per_page == 3 * a_pool().bytes_per_layer_page == 3 * 2 * 16 * 2 * 8 * 4
    assert a_pool(torch.bfloat16).bytes_per_page == 3 * 2 * 16 * 2 * 8 * 2


def test_pages_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \(2, 2, 16, 2, 8\)"):
        a_pool().scatter(0, (1, 2), torch.zeros(1, 2, 16, 2, 8))


def test_pages_are_handed_out_once_until_they_are_free_again() -> None:
    allocator = PageAllocator(5)
    first, second = allocator.allocate(3), allocator.allocate(2)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (allocator.allocate(1), allocator.num_free) == (None, 0)
    allocator.free(first)
    assert allocator.num_free == 3
    assert sorted(allocator.allocate(3) or ()) == sorted(first)


def test_no_pages_are_taken_when_too_few_are_free() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(5) is None
    assert allocator.num_free == 4
    assert allocator.allocate(0) == ()


def test_freeing_a_free_page_is_a_bug_that_shows() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    assert pages is not None
    allocator.free(pages)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(pages)


@pytest.mark.parametrize("wrong", [(0, 0), (0, 3), (0, 4), (-1,)])
def test_pages_given_back_wrongly_are_refused_as_a_whole(wrong: tuple[int, ...]) -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(2) == (0, 1)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(wrong)
    assert allocator.num_free == 2
    allocator.free((1, 0))
    assert allocator.allocate(2) == (0, 1)


def test_a_pool_has_at_least_one_page() -> None:
    with pytest.raises(ValueError, match="total_pages"):
        PageAllocator(0)
