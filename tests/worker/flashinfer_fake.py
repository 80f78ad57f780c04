"""FlashInfer on a CPU: the same arguments, read the same way, computed by the formula.

What is checked is what the library's kernels rely on and cannot report (index types, strides,
supported dimensions) besides what its Python and C++ code refuses, workspaces that are too small
among that. Every call is recorded, so that a test can bind it against the installed release's
signature. Kernels that are launched while a graph is captured are part of it (``graph_fake``), and
nothing can be planned then.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.worker.flashinfer_formulas import (
    append_paged_kv_cache,
    apply_rope_with_cos_sin_cache_inplace,
    attend,
    check_heads,
    check_indices,
    check_indptr,
    check_queries,
    check_vectors,
    fused_add_rmsnorm,
    rmsnorm,
    silu_and_mul,
)
from tests.worker.flashinfer_plans import INT_WORKSPACE_BYTES, Planned, plan_fa2, plan_fa3
from tests.worker.graph_fake import launch, refuse_while_capturing
from torch import Tensor


class FakeFlashInfer:
    """The part of ``flashinfer`` that the worker uses.

    Attributes:
        calls: function or ``Class.method``, arguments, keyword arguments; in order.
        planned: index arrays of every plan, as lists.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.planned: list[dict[str, Any]] = []
        self.BatchPrefillWithPagedKVCacheWrapper = partial(_Paged, self)
        self.BatchPrefillWithRaggedKVCacheWrapper = partial(_Ragged, self)

    def record(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, args, kwargs))

    def called(self, name: str) -> int:
        return sum(1 for each, _, _ in self.calls if each == name)

    def append_paged_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self.record("append_paged_kv_cache", *args, **kwargs)
        launch(append_paged_kv_cache, *args, **kwargs)

    def rmsnorm(self, *args: Any, **kwargs: Any) -> Tensor:
        self.record("rmsnorm", *args, **kwargs)
        return launch(rmsnorm, *args, **kwargs)

    def fused_add_rmsnorm(self, *args: Any, **kwargs: Any) -> None:
        self.record("fused_add_rmsnorm", *args, **kwargs)
        launch(fused_add_rmsnorm, *args, **kwargs)

    def silu_and_mul(self, *args: Any, **kwargs: Any) -> Tensor:
        self.record("silu_and_mul", *args, **kwargs)
        return launch(silu_and_mul, *args, **kwargs)

    def apply_rope_with_cos_sin_cache_inplace(self, *args: Any, **kwargs: Any) -> None:
        self.record("apply_rope_with_cos_sin_cache_inplace", *args, **kwargs)
        launch(apply_rope_with_cos_sin_cache_inplace, *args, **kwargs)


# Parameters below are the real ones' by name, order and default (a test compares them).


class _Wrapper:
    """What both wrappers do alike: record each call, and keep what a plan says of the numbers."""

    name: str
    _plan: Callable[..., None]
    _run: Callable[..., Tensor]

    def _start(
        self, fake: FakeFlashInfer, workspace: Tensor, kv_layout: str, **options: Any
    ) -> None:
        refuse_while_capturing("make a wrapper")
        self._fake, self._workspace, self._backend = fake, workspace, options["backend"]
        fake.record(f"{self.name}.__init__", workspace, kv_layout, **options)
        _check_workspace(workspace, self._backend)
        assert kv_layout == "NHD"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        refuse_while_capturing("plan")
        self._fake.record(f"{self.name}.plan", *args, **kwargs)
        self._plan(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        self._fake.record(f"{self.name}.run", *args, **kwargs)
        return launch(self._run, *args, **kwargs)

    def _lay_out(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        heads: tuple[int, int, int],
        page_size: int,
        *,
        num_rows: int | None = None,
    ) -> Planned:
        """The plan in the workspaces. ``num_rows``: of a graph's first plan."""
        is_in_graph = num_rows is not None
        rows = int(qo_indptr[-1]) if num_rows is None else num_rows
        bounds = qo_indptr.tolist()
        if self._backend == "fa3":
            planned = plan_fa3(bounds, rows, heads[0], heads[2], is_in_graph=is_in_graph)
        else:
            own = bounds, kv_indptr.tolist(), rows, *heads, page_size
            planned = plan_fa2(*own, is_in_graph=is_in_graph)
        return planned

    def _check_room(self, planned: Planned) -> None:
        assert planned.int_bytes <= INT_WORKSPACE_BYTES, "Buffer overflow: batch_prefill indices"
        room = self._workspace.nbytes
        assert planned.float_bytes <= room, "Buffer overflow: batch_prefill_tmp_v"

    def _keep(
        self, heads: tuple[int, int, int], causal: bool, sm_scale: float | None, q: Any, kv: Any
    ) -> None:
        check_heads(*heads)
        self._heads, self._causal = heads, causal
        self._scale = heads[2] ** -0.5 if sm_scale is None else sm_scale
        self._dtypes = q, q if kv is None else kv


class _Paged(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        fake: FakeFlashInfer,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        options = {"use_cuda_graph": True, **buffers} if use_cuda_graph else {}
        self._start(fake, float_workspace_buffer, kv_layout, backend=backend, **options)
        self._buffers: list[Tensor] | None = None
        self._most_rows: int | None = None
        if use_cuda_graph:
            given = [each for each in buffers.values() if each is not None]
            assert len(given) == len(buffers)
            for each in given:
                check_indices(each)
            qo, kv, _, last = (len(each) for each in given)
            assert qo == kv == last + 1
            self._buffers, self._batch_size = given, last

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        self._fake.record(f"{self.name}.workspace_size", *args, **kwargs)
        return self._workspace_size(*args, **kwargs)

    def _workspace_size(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> tuple[int, int]:
        refuse_while_capturing("ask for sizes")
        assert self._backend == "fa2", "no other has it"
        assert self._buffers is not None
        heads = num_qo_heads, num_kv_heads, head_dim_qk
        rows = self._most_rows or int(qo_indptr[-1])
        planned = self._lay_out(qo_indptr, paged_kv_indptr, heads, page_size, num_rows=rows)
        return planned.float_bytes, planned.int_bytes

    def _plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        seq_lens: Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            check_indices(each)
        batch_size = len(qo_indptr) - 1
        check_indptr(qo_indptr)
        check_indptr(paged_kv_indptr)
        assert len(paged_kv_indptr) == batch_size + 1
        assert len(paged_kv_last_page_len) == batch_size
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        has_keys = paged_kv_indptr.diff() > 0
        assert (has_keys | (qo_indptr.diff() == 0)).all(), "queries without keys"
        assert (paged_kv_last_page_len[has_keys] >= 1).all()
        assert (paged_kv_last_page_len[~has_keys] == 0).all()
        assert paged_kv_last_page_len.max() <= page_size
        lengths = (paged_kv_indptr.diff() - 1).clamp(min=0) * page_size + paged_kv_last_page_len
        if seq_lens is not None:
            check_indices(seq_lens)
            assert torch.equal(seq_lens, lengths)
        if max_token_per_sequence is not None:
            assert max_token_per_sequence >= qo_indptr.diff().max()
        if self._buffers is not None:
            self._fill_buffers(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        planned = self._lay_out(
            qo_indptr, paged_kv_indptr, heads, page_size, num_rows=self._most_rows
        )
        self._check_room(planned)
        self._keep(heads, causal, sm_scale, q_data_type, kv_data_type)
        self._qo_indptr = qo_indptr.tolist()
        self._kv_indptr = paged_kv_indptr.tolist()
        self._kv_indices = paged_kv_indices  # on the device already: not copied
        self._last_page_len = paged_kv_last_page_len.tolist()
        self._page_size = page_size
        self._fake.planned.append(
            {
                "kind": "paged",
                "qo_indptr": self._qo_indptr,
                "kv_indptr": self._kv_indptr,
                "kv_indices": paged_kv_indices.tolist(),
                "last_page_len": self._last_page_len,
            }
        )

    def _fill_buffers(self, *arrays: Tensor) -> None:
        """The plan is what the buffers hold from now on; a graph's kernels read it there."""
        assert self._buffers is not None
        rows = int(arrays[0][-1])
        if self._most_rows is None:
            self._most_rows = rows
        if rows > self._most_rows:
            raise ValueError("The total number of rows in qo_indptr in cuda graph mode")
        if len(arrays[0]) - 1 != self._batch_size:
            raise ValueError("The batch size should be fixed during the lifecycle of the wrapper")
        if len(arrays[2]) > len(self._buffers[2]):
            raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
        for buffer, array in zip(self._buffers, arrays, strict=True):
            buffer[: len(array)].copy_(array)

    def _run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor | None = None) -> Tensor:
        num_qo_heads, num_kv_heads, head_dim = self._heads
        if self._buffers is not None:
            # Kernels of a graph run again without this code, on whatever the buffers hold then.
            assert q.size(0) == self._most_rows, "captured with a full batch"
            assert out is not None, "a graph's result would move"
            qo, kv, self._kv_indices, last = self._buffers
            self._qo_indptr, self._kv_indptr = qo.tolist(), kv.tolist()
            self._last_page_len = last.tolist()
        assert paged_kv_cache.shape[1:] == (2, self._page_size, num_kv_heads, head_dim)
        check_vectors(paged_kv_cache)
        assert (q.dtype, paged_kv_cache.dtype) == self._dtypes
        assert q.shape[1:] == (num_qo_heads, head_dim)
        most_rows = self._qo_indptr[-1] if self._buffers is None else q.size(0)
        out = check_queries(q, most_rows, out)
        out[: self._qo_indptr[-1]] = torch.nan
        k_cache, v_cache = paged_kv_cache.unbind(1)
        for number, last_page_len in enumerate(self._last_page_len):
            pages = self._kv_indices[self._kv_indptr[number] : self._kv_indptr[number + 1]].long()
            length = (len(pages) - 1) * self._page_size + last_page_len
            k, v = (side[pages].flatten(0, 1)[:length] for side in (k_cache, v_cache))
            rows = slice(self._qo_indptr[number], self._qo_indptr[number + 1])
            out[rows] = attend(q[rows], k, v, self._scale, self._causal)
        return out


class _Ragged(_Wrapper):
    name = "BatchPrefillWithRaggedKVCacheWrapper"

    def __init__(
        self,
        fake: FakeFlashInfer,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
    ) -> None:
        self._start(fake, float_workspace_buffer, kv_layout, backend=backend)

    def _plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        for each in (qo_indptr, kv_indptr):
            check_indices(each)
            check_indptr(each)
        assert len(qo_indptr) == len(kv_indptr)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._check_room(self._lay_out(qo_indptr, kv_indptr, heads, 1))
        self._keep(heads, causal, sm_scale, q_data_type, kv_data_type)
        self._qo_indptr, self._kv_indptr = qo_indptr.tolist(), kv_indptr.tolist()
        self._fake.planned.append(
            {"kind": "ragged", "qo_indptr": self._qo_indptr, "kv_indptr": self._kv_indptr}
        )

    def _run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None) -> Tensor:
        num_qo_heads, num_kv_heads, head_dim = self._heads
        assert k.shape == v.shape == (self._kv_indptr[-1], num_kv_heads, head_dim)
        check_vectors(k, v)
        assert (q.dtype, k.dtype) == self._dtypes
        assert q.shape[1:] == (num_qo_heads, head_dim)
        out = check_queries(q, self._qo_indptr[-1], out).fill_(torch.nan)
        for number in range(len(self._qo_indptr) - 1):
            rows = slice(self._qo_indptr[number], self._qo_indptr[number + 1])
            seen = slice(self._kv_indptr[number], self._kv_indptr[number + 1])
            out[rows] = attend(q[rows], k[seen], v[seen], self._scale, self._causal)
        return out


def _check_workspace(buffer: Tensor, backend: str) -> None:
    assert buffer.dtype == torch.uint8
    assert buffer.data_ptr() % 16 == 0
    assert backend in ("fa2", "fa3")


SIGNATURES = {
    "BatchPrefillWithPagedKVCacheWrapper.__init__": partial(_Paged, FakeFlashInfer()),
    "BatchPrefillWithPagedKVCacheWrapper.plan": partial(_Paged._plan, None),
    "BatchPrefillWithPagedKVCacheWrapper.run": partial(_Paged._run, None),
    "BatchPrefillWithPagedKVCacheWrapper.workspace_size": partial(_Paged._workspace_size, None),
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": partial(_Ragged, FakeFlashInfer()),
    "BatchPrefillWithRaggedKVCacheWrapper.plan": partial(_Ragged._plan, None),
    "BatchPrefillWithRaggedKVCacheWrapper.run": partial(_Ragged._run, None),
    "append_paged_kv_cache": append_paged_kv_cache,
    "rmsnorm": rmsnorm,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "silu_and_mul": silu_and_mul,
    "apply_rope_with_cos_sin_cache_inplace": apply_rope_with_cos_sin_cache_inplace,
}
"""What the fake takes, to compare with what the library takes."""
