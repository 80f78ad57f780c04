"""FlashInfer's planners (0.6.18, ``scheduler.cuh``) in Python: tiles, splits, and bytes of memory.

What a plan writes to a workspace is laid out as there, so that a workspace that is too small is
refused on a CPU as it is on a GPU. An H200's multiprocessors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NUM_SMS = 132
INT_WORKSPACE_BYTES = 8 * 2**20
"""Of every wrapper, on the device and pinned."""

_FA3_TILE_QUERIES = {64: 192}


@dataclass(frozen=True)
class Planned:
    """Attributes:
    num_tiles: of queries and parts of keys. padded_tiles: thread blocks for each K/V head.
    """

    is_split: bool
    tile_queries: int
    num_tiles: int
    padded_tiles: int
    float_bytes: int
    int_bytes: int


def plan_fa2(
    qo_indptr: Sequence[int],
    kv_indptr: Sequence[int],
    num_rows: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    is_in_graph: bool,
) -> Planned:
    """``PrefillPlanImpl``. ``num_rows``: in a graph those of the first plan, else these."""
    group, batch_size = num_qo_heads // num_kv_heads, len(qo_indptr) - 1
    packed = [group * length for length in _lengths(qo_indptr)]
    pages = _lengths(kv_indptr)
    if is_in_graph:
        tile = _tile_queries(group * (num_rows - batch_size + 1), head_dim)
        most_tiles = _ceil(num_rows * group, tile) + batch_size - 1
    else:
        tile = _tile_queries(sum(packed) // batch_size, head_dim)
        most_tiles = 0
    splits_up_to = 2 * NUM_SMS // num_kv_heads
    is_split, chunk = _chunk_pages(
        packed, pages, tile, splits_up_to, max(128 // page_size, 1), is_in_graph=is_in_graph
    )
    num_tiles = _num_tiles(packed, pages, tile, chunk)
    padded = max(splits_up_to, most_tiles) if is_in_graph else num_tiles
    assert num_tiles <= padded, "new batch size should not exceed padded batch size"
    ints = [4 * padded] * 3 + [4 * (batch_size + 1), 4] + [4] * is_in_graph
    floats = []
    if is_split:
        ints += [4 * (num_rows + 1), padded]
        floats = [4 * num_qo_heads * padded * tile * each for each in (head_dim, 1)]
    return Planned(is_split, tile, num_tiles, padded, _laid_out(floats), _laid_out(ints))


def plan_fa3(
    qo_indptr: Sequence[int],
    num_rows: int,
    num_qo_heads: int,
    head_dim: int,
    *,
    is_in_graph: bool,
) -> Planned:
    """``PrefillSM90Plan``: the work of each multiprocessor, in no workspace of floats."""
    tile, batch_size = _FA3_TILE_QUERIES.get(head_dim, 128), len(qo_indptr) - 1
    most_a_head = _ceil(num_rows, tile) + batch_size - 1
    num_heads = 1 if most_a_head > 4096 else num_qo_heads
    num_works = num_heads * sum(_ceil(length, tile) for length in _lengths(qo_indptr))
    padded = num_heads * most_a_head if is_in_graph else num_works
    assert num_works <= padded, "a graph's work list is as long as its first plan says"
    ints = [4 * padded] * 6 + [4 * (NUM_SMS + 1), 4 * padded]
    return Planned(False, tile, num_works, padded, 0, _laid_out(ints))


def _tile_queries(packed_length: int, head_dim: int) -> int:
    """``FA2DetermineCtaTileQ`` for heads of at most 256, on Ampere and newer."""
    if packed_length > 64 and head_dim < 256:
        return 128
    return 64 if packed_length > 16 else 16


def _chunk_pages(
    packed: Sequence[int],
    pages: Sequence[int],
    tile: int,
    splits_up_to: int,
    least_pages: int,
    *,
    is_in_graph: bool,
) -> tuple[bool, int]:
    """``PrefillBinarySearchKVChunkSize``."""
    longest = max(1, *pages)
    low, high = least_pages, longest
    while low < high:
        middle = (low + high) // 2
        if _num_tiles(packed, pages, tile, middle) > splits_up_to:
            low = middle + 1
        else:
            high = middle
    return is_in_graph or low < longest, low


def _num_tiles(packed: Sequence[int], pages: Sequence[int], tile: int, chunk: int) -> int:
    pairs = zip(packed, pages, strict=True)
    return sum(_ceil(length, tile) * _ceil(max(each, 1), chunk) for length, each in pairs)


def _lengths(indptr: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(indptr)]


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit)


def _laid_out(sizes: Sequence[int]) -> int:
    """Bytes of arrays behind each other, each at a multiple of 16."""
    end = 0
    for size in sizes:
        end = _ceil(end, 16) * 16 + size
    return end
