"""The real FlashInfer on a CPU, down to its compiled modules: those are stand-ins.

Run as a process of its own by ``test_flashinfer_operators``. All of the library's Python runs: what
it checks, derives, converts and hands to its kernels. The stand-ins take what the kernels take and
compute by ``flashinfer_formulas``.
"""

import sys
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import flashinfer
import torch
from flashinfer import activation, norm, page, prefill, rope
from tests.worker import flashinfer_formulas as formulas
from tests.worker.attention_batches import (
    a_pool,
    expected,
    is_within_rounding,
    new_sides,
    of_masked,
    packed,
    pages_after,
    random_queries,
    random_sequences,
)
from tests.worker.fixed_batches import FixedRows, random_decodes
from torch import Tensor

from sangam_worker.attention.flashinfer_backend import FlashInferAttention
from sangam_worker.models.flashinfer_operators import FlashInferOperators
from sangam_worker.models.linear import PlainLinear
from sangam_worker.models.operators import TorchOperators
from sangam_worker.models.random_models import random_config
from sangam_worker.packing import pack

BFLOAT16 = torch.bfloat16
_NON_CAUSAL, _NHD, _NO_WINDOW = 0, 0, -1


issued: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
"""Every kernel that was launched, with its arguments: what a CUDA graph would hold."""


def launched(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel, noted as often as it is launched."""

    def launch(*args: Any) -> None:
        issued.append((kernel, args))
        kernel(*args)

    return launch


class AttentionKernels:
    """What ``get_batch_prefill_module`` gives: a planner and two kernels."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self.paged_run = launched(self._paged_run)
        # FA3's has no such function in this release.
        self.workspace_size = self._workspace_size if backend == "fa2" else None

    def plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lengths: Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        is_in_graph: bool,
        *rest: Any,
    ) -> list[int]:
        for each in (qo_indptr, kv_indptr, kv_lengths):
            assert each.dtype == torch.int32, "read as such"
            assert each.device.type == "cpu"
        assert len(qo_indptr) == len(kv_indptr) == len(kv_lengths) + 1 == batch_size + 1
        assert qo_indptr[-1] <= total_num_rows
        if page_size > 1:
            pages = (kv_lengths + page_size - 1) // page_size
            assert torch.equal(pages, kv_indptr.diff())
        # What a graph's kernels have for good: all that goes into their grid and offsets.
        return [total_num_rows, batch_size, int(is_in_graph)]

    def _workspace_size(
        self,
        float_workspace: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lengths: Tensor,
        *rest: Any,
    ) -> tuple[int, int]:
        assert len(kv_indptr) == len(kv_lengths) + 1
        return 2 * len(float_workspace), 2**16

    def _paged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: list[int],
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        *rest: Any,
    ) -> None:
        scale = self._scale(rest)
        for each in (qo_indptr, kv_indptr, kv_indices, last_page_len):
            assert each.dtype == torch.int32
        for number in range(len(qo_indptr) - 1):
            if qo_indptr[number] == qo_indptr[number + 1]:
                continue
            pages = kv_indices[kv_indptr[number] : kv_indptr[number + 1]].long()
            length = (len(pages) - 1) * k_cache.shape[1] + int(last_page_len[number])
            k, v = (side[pages].flatten(0, 1)[:length] for side in (k_cache, v_cache))
            rows = slice(int(qo_indptr[number]), int(qo_indptr[number + 1]))
            out[rows] = formulas.attend(q[rows], k, v, scale, causal=False)

    def ragged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        out: Tensor,
        lse: Tensor | None,
        *rest: Any,
    ) -> None:
        scale = self._scale(rest)
        for number in range(len(qo_indptr) - 1):
            rows = slice(int(qo_indptr[number]), int(qo_indptr[number + 1]))
            seen = slice(int(kv_indptr[number]), int(kv_indptr[number + 1]))
            out[rows] = formulas.attend(q[rows], k[seen], v[seen], scale, causal=False)

    def _scale(self, rest: tuple[Any, ...]) -> float:
        mask_mode, layout, window_left, _, *others = rest
        assert (mask_mode, layout, window_left) == (_NON_CAUSAL, _NHD, _NO_WINDOW)
        soft_cap, scale = [each for each in others if isinstance(each, float)][:2]
        assert soft_cap == 0.0
        return scale


@launched
def append(
    key: Tensor, value: Tensor, batch: Tensor, positions: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> None:
    *tables, layout = rest
    assert layout == _NHD
    both = torch.stack((k, v), 1)
    formulas.append_paged_kv_cache(key, value, batch, positions, both, *tables)
    k.copy_(both[:, 0])
    v.copy_(both[:, 1])


def rotated(
    q: Tensor, k: Tensor, q_rope: Tensor, k_rope: Tensor, cache: Tensor, ids: Tensor, inter: bool
) -> None:
    assert (q.data_ptr(), k.data_ptr()) == (q_rope.data_ptr(), k_rope.data_ptr())
    assert not inter
    formulas.apply_rope_with_cos_sin_cache_inplace(ids, q, k, q.shape[-1], cache)


def normed(out: Tensor, x: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
    out.copy_(formulas.rmsnorm(x, weight, eps))


def added_and_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool) -> None:
    formulas.fused_add_rmsnorm(x, residual, weight, eps)


def gated(out: Tensor, x: Tensor, pdl: bool) -> None:
    out.copy_(formulas.silu_and_mul(x))


def stand_in() -> None:
    """Put the stand-ins where the library would load compiled modules, and ask for no GPU."""
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **options: empty(*args, **options)
    prefill.get_batch_prefill_module = lambda backend, *args: AttentionKernels(backend)
    prefill._get_cache_alibi_slopes_buf = lambda *args: None
    page.get_page_module = lambda: SimpleNamespace(append_paged_kv_cache=append)
    rope.get_rope_module = lambda: SimpleNamespace(apply_rope_pos_ids_cos_sin_cache=rotated)
    norm.get_norm_module = lambda: SimpleNamespace(
        rmsnorm=normed, fused_add_rmsnorm=added_and_normed
    )
    norm._use_cuda_norm = lambda device: True
    activation.get_act_and_mul_module = lambda name: SimpleNamespace(silu_and_mul=gated)
    for module in (prefill, norm, activation):
        module.device_support_pdl = lambda device: False


def check_attention(head_dim: int, num_heads: int, num_kv_heads: int, seed: int) -> None:
    torch.manual_seed(seed)
    pool = a_pool(num_kv_heads, head_dim, dtype=BFLOAT16)
    sequences = random_sequences(Random(seed), pool)
    wanted = pages_after(sequences, pool.layers[1])
    queries = random_queries(sequences, num_heads, pool)
    heads = of_masked(queries, sequences)
    kernel = ("fa2", "fa3")[seed % 2]
    backend = FlashInferAttention(pool, num_heads, flashinfer, lambda layout: kernel)
    backend.plan(pack([each.item for each in sequences], "llada").layout)
    out = backend.run(packed(queries), *new_sides(sequences), 1)
    chosen = backend.run(packed(heads), *new_sides(sequences), 1, head_rows_only=True)
    assert is_within_rounding(out, *expected(queries, sequences))
    assert is_within_rounding(chosen, *expected(heads, sequences))
    assert torch.equal(pool.layers[1].nan_to_num(9.0), wanted.nan_to_num(9.0))


def check_fixed_attention(num_heads: int, num_kv_heads: int, seed: int) -> None:
    """A graph by hand: kernels that were launched once, launched again with the same arguments."""
    torch.manual_seed(seed)
    random, kernel = Random(seed), ("fa2", "fa3")[seed % 2]
    pool = a_pool(num_kv_heads, 64, dtype=BFLOAT16)
    backend = FlashInferAttention(pool, num_heads, flashinfer, lambda layout: kernel)
    rows = FixedRows(backend, pool, num_heads, 4, 8)
    issued.clear()
    rows.run()
    graph = issued.copy()
    assert len(graph) == 2, "rows are kept, then attended to"

    def replay() -> None:
        for launch, args in graph:
            launch(*args)

    for num_blocks in (4, 1, 3):
        rows.check(random_decodes(random, pool, num_blocks, 8), replay)


def check_operators(name: str) -> None:
    torch.manual_seed(0)
    config, cpu = random_config(name), torch.device("cpu")
    ours = FlashInferOperators(config, BFLOAT16, cpu, flashinfer)
    torchs = TorchOperators(config, BFLOAT16, cpu)
    x, inputs, weight = torch.randn(3, 16, 64).to(BFLOAT16).unbind(0)
    weight = weight[0]
    gate, up = torch.randn(2, 32, 64).div(8).to(BFLOAT16).unbind(0)
    product = PlainLinear(torch.randn(64, 64).div(8).to(BFLOAT16), None)
    wide = torch.randn(16, 4, config.head_dim).to(BFLOAT16)
    pairs = [
        (
            each.norm(x, weight),
            *each.add_norm(product, inputs, x.clone(), weight),
            each.gate_up(gate.clone(), up.clone())(x),
            each.rotation(torch.arange(16))(wide.clone()[:, :3]),
        )
        for each in (ours, torchs)
    ]
    for ours_result, torchs_result in zip(*pairs, strict=True):
        assert torch.allclose(ours_result.float(), torchs_result.float(), rtol=0.02, atol=0.06)


def main() -> None:
    stand_in()
    for seed in range(6):
        for head_dim in (16, 64, 128):
            check_attention(head_dim, 4, 4, seed)
            check_attention(head_dim, 6, 2, seed)
    for seed in range(2):  # one for each kernel
        check_fixed_attention(4, 4, seed)
        check_fixed_attention(6, 2, seed)
    for name in ("random:llada-100m", "random:dream-7b"):
        check_operators(name)
    sys.stdout.write("as expected\n")


if __name__ == "__main__":
    main()
