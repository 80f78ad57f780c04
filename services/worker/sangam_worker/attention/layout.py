"""The index arrays of one packed iteration: which rows are whose, which pages they see.

Built by ``packing`` once per iteration, read by an attention backend's ``plan``. Shaped like the
arguments of FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper.plan`` (non-causal). numpy only.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayout:
    """``n`` sequences in a packed batch of ``rows`` rows (padding rows behind them).

    Attributes:
        qo_indptr: ``[n + 1]``, sequence i feeds rows ``qo_indptr[i]:qo_indptr[i + 1]``.
        head_indptr: ``[n + 1]``, the same for the last layer's queries (rows that can commit).
        kv_lengths: ``[n]``, leading positions that the rows attend to.
        is_ragged: ``[n]``, the rows fed are all the rows seen: attend to the new K/V directly.
        kv_page_indptr: ``[n + 1]`` into kv_page_indices; kv_page_indices: page numbers that hold
            ``kv_lengths`` positions, none for a ragged sequence.
        kv_last_page_lengths: ``[n]``, positions on the last page (0 for a ragged sequence).
        write_rows, write_slots: packed rows whose K/V are kept, and where: ``page * 16 + slot``.
    """

    qo_indptr: Int32s
    head_indptr: Int32s
    kv_lengths: Int32s
    is_ragged: Bools
    kv_page_indptr: Int32s
    kv_page_indices: Int32s
    kv_last_page_lengths: Int32s
    write_rows: Int64s
    write_slots: Int64s
