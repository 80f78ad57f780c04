"""Our own kernel for decode blocks: which tilings there are, and the kernel itself, interpreted
against the formula and compiled for a GPU."""

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.worker.attention_batches import dense, is_within_rounding
from tests.worker.interpreter import interpreted, needs_interpreter
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.blocks import (
    Tiling,
    can_attend,
    num_query_tiles,
    partial_shapes,
    tilings,
)
from sangam_worker.attention.protocol import FixedBatch

BFLOAT16 = torch.bfloat16
H200 = 132


# Which tilings


@pytest.mark.parametrize(
    ("num_sequences", "num_heads", "num_kv_heads", "named"),
    [
        (1, 32, 32, ["32x64/1", "32x64/2", "32x64/4", "32x64/8"]),
        (4, 32, 32, ["32x64/1", "32x64/2", "32x64/4", "32x64/8"]),  # 128 tiles; 528 are enough
        (8, 32, 32, ["32x64/1", "32x64/2", "32x64/4"]),
        (12, 32, 32, ["32x64/1", "32x64/2"]),
        (20, 32, 32, ["32x64/1"]),
        (64, 32, 32, ["32x64/1"]),
        (12, 28, 4, ["64x64/1", "64x64/2", "64x64/4"]),  # four tiles of 224 rows share K and V
        (40, 28, 4, ["64x64/1"]),
    ],
)
def test_keys_are_split_while_the_device_is_not_full(
    num_sequences: int, num_heads: int, num_kv_heads: int, named: list[str]
) -> None:
    found = [str(each) for each in tilings(num_sequences, 32, num_heads, num_kv_heads, H200)]
    first = [each for each in found if each.startswith(f"blocks {named[0][:2]}x")]
    assert first == [f"blocks {each}" for each in named]
    assert len({*found}) == len(found), "names tell them apart"


def test_a_wider_tiling_is_tried_as_well() -> None:
    llada = {each.num_queries for each in tilings(1, 32, 32, 32, H200)}
    dream = {each.num_queries for each in tilings(1, 32, 28, 4, H200)}
    assert (llada, dream) == ({32, 64}, {64, 128})


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 32), (28, 4)])
@pytest.mark.parametrize("num_sequences", [1, 2, 4, 6, 8, 12, 64])
def test_parts_fit_into_flashinfer_s_workspace(
    num_sequences: int, num_heads: int, num_kv_heads: int
) -> None:
    for tiling in tilings(num_sequences, 32, num_heads, num_kv_heads, H200):
        shapes = partial_shapes(32 * num_sequences, num_heads, 128, tiling)
        assert 4 * sum(torch.Size(each).numel() for each in shapes) <= 128 * 2**20
        assert (shapes[0][0] == 0) is (tiling.num_splits == 1)


def test_heads_are_powers_of_two_from_16_to_128() -> None:
    assert [each for each in range(1, 300) if can_attend(each)] == [16, 32, 64, 128]


# The kernel


@dataclass
class Blocks:
    """Arguments of the kernel, and what it should leave in the answers."""

    q: Tensor
    pages: Tensor
    batch: FixedBatch
    workspace: Tensor
    answers: Tensor
    exact: Tensor
    size: Tensor


def blocks(
    lengths: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    rows: int = 32,
    answer_dim: int | None = None,
    device: str = "cpu",
) -> Blocks:
    """Sequences of ``lengths`` on any pages, full of NaN where no position is; 0 fills up."""
    random = Random(str(lengths))
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    total_pages = sum(counts) + 3
    pages = torch.full(
        (total_pages, 2, PAGE_TOKENS, num_kv_heads, head_dim), torch.nan, dtype=BFLOAT16
    )
    free = random.sample(range(total_pages), total_pages)
    num_rows = rows * len(lengths)
    # As in a layer: queries, keys and values of a row behind each other.
    q = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim).to(BFLOAT16)[:, :num_heads]
    answers = torch.full((num_rows, num_heads, answer_dim or head_dim), 7.0, dtype=BFLOAT16)
    exact = answers[:, :, :head_dim].double().flatten(1)
    size = torch.ones_like(exact)
    named = []
    for number, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = [free.pop() for _ in range(count)]
        named += own
        if not length:
            continue
        keys, values = torch.randn(2, length, num_kv_heads, head_dim).to(BFLOAT16).unbind(0)
        for position in range(length):
            page, slot = own[position // PAGE_TOKENS], position % PAGE_TOKENS
            pages[page, 0, slot], pages[page, 1, slot] = keys[position], values[position]
        own_rows = slice(rows * number, rows * (number + 1))
        exact[own_rows], size[own_rows] = dense(q[own_rows], keys, values)

    def on_device(numbers: list[int]) -> Tensor:
        # In the middle of an upload: nothing is aligned.
        return torch.tensor([0, *numbers], dtype=torch.int32, device=device)[1:]

    indptr = torch.tensor([0, *counts]).cumsum(0).tolist()
    batch = FixedBatch(
        num_sequences=len(lengths),
        rows_per_sequence=rows,
        full=None,  # type: ignore[arg-type]
        write_slots=on_device([]),
        kv_lengths=on_device(lengths),
        page_indptr=on_device(indptr),
        page_indices=on_device(named),
    )
    on_gpu = [each.to(device) for each in (pages, torch.zeros(2**24, dtype=torch.uint8), answers)]
    return Blocks(_strided(q, device), on_gpu[0], batch, on_gpu[1], on_gpu[2], exact, size)


def _strided(q: Tensor, device: str) -> Tensor:
    """On the device with its rows as far apart as here."""
    wide = torch.zeros(len(q), q.stride(0) // q.shape[2], q.shape[2], dtype=q.dtype, device=device)
    wide[:, : q.shape[1]] = q.to(device)
    return wide[:, : q.shape[1]]


def check(given: Blocks, answers: Tensor) -> None:
    """Within rounding of the formula; rows that fill up are left alone, and so is what is behind
    a head's entries."""
    head_dim = given.q.shape[2]
    is_fed = given.batch.kv_lengths.cpu() > 0
    fed = is_fed.repeat_interleave(given.batch.rows_per_sequence)
    answers = answers.cpu()
    found = answers[:, :, :head_dim].flatten(1)
    assert is_within_rounding(found[fed], given.exact[fed], given.size[fed])
    assert (answers[~fed] == 7).all(), "filled up"
    assert (answers[:, :, head_dim:] == 7).all(), "padding of heads"


CASES = [
    ([33, 0, 150], (4, 4, 64)),
    ([64], (7, 1, 32)),
    ([1, 16, 17, 129], (6, 2, 16)),
    ([0, 200], (2, 2, 32)),
]


@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_the_interpreted_kernel_attends_to_every_position_and_nothing_else(num_splits: int) -> None:
    torch.manual_seed(0)
    with interpreted("tests.worker.blocks_interpreted:run") as run:
        for lengths, shape in CASES:
            given = blocks(lengths, *shape, rows=8)
            for tiling in (Tiling(16, 64, 4, 3, num_splits), Tiling(64, 32, 4, 3, num_splits)):
                arguments = (given.q, given.pages, given.batch, tiling)
                check(given, run(*arguments, given.workspace, given.answers))


@needs_interpreter
def test_heads_of_a_model_in_its_tilings_and_answers_wider_than_heads() -> None:
    torch.manual_seed(1)
    with interpreted("tests.worker.blocks_interpreted:run") as run:
        for num_heads, num_kv_heads in ((2, 2), (7, 1)):
            given = blocks([100, 0, 70], num_heads, num_kv_heads, 128, answer_dim=144)
            for tiling in tilings(3, 32, num_heads, num_kv_heads, 6):
                arguments = (given.q, given.pages, given.batch, tiling)
                check(given, run(*arguments, given.workspace, given.answers))


def compiled(num_heads: int, num_kv_heads: int, tiling: Tiling) -> Any:
    """For sm_90 with what a call of a model's bf16 rows is compiled for."""
    from triton import compile as compile_for
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sangam_worker.attention import blocks_triton as source

    kernel: Any = source.attend_tile
    types = {
        **dict.fromkeys(("queries", "pages", "answers"), "*bf16"),
        **dict.fromkeys(("kv_lengths", "page_indptr", "page_indices", "num_splits"), "*i32"),
        **dict.fromkeys(("partial", "sums"), "*fp32"),
        **dict.fromkeys(("query_stride", "num_splits"), "i32"),
    }
    constants = {
        "scale": 0.125,
        "rows": 32,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 128,
        "answer_dim": 128,
        "page_tokens": PAGE_TOKENS,
        "num_queries": tiling.num_queries,
        "num_keys": tiling.num_keys,
        "is_split": tiling.num_splits > 1,
    }
    names = kernel.arg_names
    aligned = ("queries", "pages", "answers", "partial", "sums", "query_stride")
    return compile_for(
        ASTSource(
            kernel,
            {each: types.get(each, "constexpr") for each in names},
            constants,
            {(names.index(each),): [["tt.divisibility", 16]] for each in aligned},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiling.num_warps, "num_stages": tiling.num_stages},
    )


def model_tilings() -> list[tuple[int, int, Tiling]]:
    """Every kernel that LLaDA-8B's and Dream-7B's graphs may have on an H200, once."""
    found = []
    for num_heads, num_kv_heads in ((32, 32), (28, 4)):
        for tiling in tilings(1, 32, num_heads, num_kv_heads, H200):
            each = replace(tiling, num_splits=min(2, tiling.num_splits))
            if (num_heads, num_kv_heads, each) not in found:
                found.append((num_heads, num_kv_heads, each))
    return found


@needs_interpreter
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "tiling"), model_tilings())
def test_on_hopper_keys_are_under_way_while_others_are_multiplied(
    num_heads: int,
    num_kv_heads: int,
    tiling: Tiling,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    result = compiled(num_heads, num_kv_heads, tiling)
    ptx, is_wide = result.asm["ptx"], tiling.num_queries >= 64
    assert ("wgmma.mma_async" in ptx) is is_wide
    assert ("mma.sync" in ptx) is not is_wide
    found = re.findall(
        r"local_alloc : \(\) -> !ttg.memdesc<(\d)x(128x64|64x128)xbf16", result.asm["ttgir"]
    )
    # Of keys and of values; of wgmma's one is still being read when the next are asked for.
    num_buffers = tiling.num_stages if is_wide else tiling.num_stages - 1
    assert found == [(str(num_buffers), "128x64"), (str(num_buffers), "64x128")]
    copies = re.findall(r"cp\.async\.c[ag]\S* \[[^]]*\], \[[^]]*\], 0x([0-9a-f]+)", ptx)
    assert {*copies} == {"10"}, "16 bytes at a time"
    slots = re.findall(
        r"tt\.addptr .*tensor<(?:1x64|64x1)x!tt\.ptr<bf16>>, tensor<\w+x(i\d+)>",
        result.asm["ttir"],
    )
    assert slots == ["i64", "i64"], "LLaDA-8B's pages beyond some 16,000 begin behind 2**31 entries"
    num_tiles = 1 if tiling.num_queries == 128 else 2
    assert num_tiles * (result.metadata.shared + 1024) <= 228 * 1024, "a multiprocessor's"
    registers, spilled_bytes = assembled(ptx, tmp_path)
    assert num_tiles * registers * 32 * tiling.num_warps <= 65536
    assert spilled_bytes == 0


def assembled(ptx: str, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of those that did not find room."""
    from triton.backends.nvidia.compiler import get_ptxas

    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (
        re.search(pattern, told)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    assert registers is not None
    assert spilled is not None
    return int(registers[1]), int(spilled[1])


def test_index_arrays_of_any_alignment_and_any_number_of_parts_are_one_kernel() -> None:
    from sangam_worker.attention import blocks_triton as source

    for kernel in (source.attend_tile, source.put_together):
        parameters: dict[str, Any] = {each.name: each for each in kernel.params}
        assert parameters["num_splits"].do_not_specialize
        for name in {"kv_lengths", "page_indptr", "page_indices"} & {*parameters}:
            assert parameters[name].do_not_specialize_on_alignment


def test_a_sequence_s_queries_on_one_head_fill_whole_tiles() -> None:
    assert num_query_tiles(1, 32, Tiling(32, 64, 4, 4)) == 1
    assert num_query_tiles(7, 32, Tiling(64, 64, 4, 3)) == 4
    assert num_query_tiles(7, 32, Tiling(128, 64, 8, 3)) == 2
