"""How much memory a worker of some settings needs, from shapes alone: pages, passes, graphs.

Pure arithmetic: ``start`` settles the GPU's memory with it before anything is allocated,
and holds it against what was really taken. The counts of live tensors are the transformer's and
FlashInfer's operators'; a test follows them through a pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sangam_core.admission import ADMISSION_POLICIES
from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.flashinfer_pool import graph_workspace_bytes
from sangam_worker.flashinfer_library import kernel_dim
from sangam_worker.models import llada
from sangam_worker.models.config import model_config
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.rope import FIRST_ROWS
from sangam_worker.models.tensor_names import slots_of
from sangam_worker.sampling.candidates import ROWS_AT_ONCE
from sangam_worker.settings import DEFAULT_TOTAL_PAGES, WorkerSettings

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}

_MIB = 2**20
_WORKSPACE_BYTES = 192 * _MIB
"""FlashInfer's shared workspace (128 MiB) and the plans of the eager wrappers, 8 MiB each."""

_LIBRARY_BYTES = 512 * _MIB
"""What CUDA libraries take on their own as they are first used: kernels, which are loaded lazily,
and cuBLAS's workspaces (32 MiB a thread and stream on Hopper)."""

FIXED_BYTES = _WORKSPACE_BYTES + _LIBRARY_BYTES
"""Part of ``activation_bytes``, whatever the iteration."""

_ROUNDING = 1.1
"""The allocator's blocks are larger than tensors, and those of one size do not serve the next."""

_GRAPH_BYTES = 32 * _MIB
"""Of one captured graph beside its tensors: its nodes, and two wrappers' plans."""

_DRAWN_ENTRY_BYTES = 64
"""Of an entry of the vocabulary in a row that is drawn with noise: 46 are ``candidates``', the
rest a sort's."""


class HasLongest(Protocol):
    """A model, as far as the size of an iteration goes."""

    @property
    def max_sequence_tokens(self) -> int:
        """Limit on prompt + L."""
        ...


@dataclass(frozen=True, slots=True)
class LargestIteration:
    """The most that one iteration can hold: packed rows, rows that want logits, passes."""

    num_rows: int
    num_head_rows: int
    num_blocks: int


def config_of(settings: WorkerSettings) -> ModelConfig:
    """The model in the engine's terms, its sequences limited as set. No tensor is read.

    Raises:
        ConfigurationError: it cannot be found or read, or does not allow sequences as long.
    """
    try:
        config = model_config(settings.model)
    except ConfigurationError as error:
        raise ConfigurationError(f"SANGAM_MODEL: {error}") from error
    return config.shortened(settings.max_sequence_tokens)


def pages_set(settings: WorkerSettings, config: ModelConfig) -> int | None:
    """Pages of the pool as the settings have them; ``None`` where they say nothing.

    Raises:
        ConfigurationError: the bytes do not hold one page.
    """
    if settings.pool_bytes is None:
        return settings.total_pages
    page_bytes = bytes_per_page(config, settings.number_format)
    if settings.pool_bytes < page_bytes:
        raise ConfigurationError(
            f"SANGAM_POOL_BYTES: {settings.pool_bytes} bytes do not hold one page of {page_bytes}"
        )
    return settings.pool_bytes // page_bytes


def pages_on_cpu(settings: WorkerSettings, config: ModelConfig) -> int:
    """Pages of the pool where memory is not settled. ``ConfigurationError`` as ``pages_set``."""
    return pages_set(settings, config) or DEFAULT_TOTAL_PAGES


def bytes_per_page(config: ModelConfig, number_format: str) -> int:
    """Bytes of one page across all layers: K and V of 16 tokens."""
    numbers = 2 * PAGE_TOKENS * config.num_kv_heads * config.head_dim
    return config.num_layers * numbers * NUMBER_BYTES[number_format]


def weight_bytes(config: ModelConfig, number_format: str, *, is_fp8: bool = False) -> int:
    """Bytes of the model's tensors.

    Args:
        is_fp8: the layers' matrices take one byte an entry and a float32 scale a row.
    """
    total = 0
    for slot in slots_of(config, llada.TENSOR_NAMES).values():  # any names do for shapes
        entries = math.prod(slot.shape)
        if is_fp8 and slot.layer is not None and len(slot.shape) == 2:
            total += entries + 4 * slot.shape[0]
        else:
            total += entries * NUMBER_BYTES[number_format]
    return total


def largest_iteration(settings: WorkerSettings, config: HasLongest) -> LargestIteration:
    """The largest iteration that the scheduler can build, in any role.

    Algorithm 1 carries less than the head's cost, so that decodes and prefills together stay below
    the longest sequence and tau. Decodes with the ``prefix`` cache that were transferred would feed
    more; the scheduler keeps them to this.
    """
    policy, longest = ADMISSION_POLICIES[settings.admission], config.max_sequence_tokens
    widest = max(settings.tau_tokens_prefill, settings.tau_tokens_decode)
    tau = policy(max(widest, settings.tau_tokens_colocated), 0, 2**62)
    decode_rows = settings.max_batch_blocks * settings.block_length
    num_rows = max(min(longest + tau, settings.max_batch_blocks * longest), decode_rows)
    return LargestIteration(num_rows, min(num_rows, decode_rows), settings.max_batch_blocks)


def activation_bytes(config: ModelConfig, iteration: LargestIteration, number_format: str) -> int:
    """Memory that an eager iteration of this size takes while it runs.

    With it what grows once and stays: the table of rotations, workspaces, libraries.
    """
    rows = iteration.num_rows * _bytes_per_row(config, number_format)
    logits = iteration.num_head_rows * config.vocab_size * NUMBER_BYTES[number_format]
    drawn = min(ROWS_AT_ONCE, iteration.num_head_rows) * config.vocab_size * _DRAWN_ENTRY_BYTES
    # The layers' tensors are gone when the head's come.
    peak = max(rows, iteration.num_rows * 4 * config.hidden_size + logits + drawn)
    return int(peak * _ROUNDING) + rotation_bytes(config) + FIXED_BYTES


def rotation_bytes(config: ModelConfig) -> int:
    """Tables of rotations up to the longest sequence: cos and half a sin, and both in one.

    In float32, as LLaDA has them; the torch operators that FlashInfer's keep have a first table.
    """
    return 10 * config.head_dim * (config.max_sequence_tokens + FIRST_ROWS)


def graph_bytes(
    config: ModelConfig, buckets: Sequence[int], block_tokens: int, number_format: str
) -> int:
    """Memory that captured decode iterations keep: they share the largest one's tensors.

    FA2's partial results are among them: from 27 blocks of Dream-7B on (52 of LLaDA-8B) they exceed
    FlashInfer's usual workspace.

    Their logits are not: the head is issued behind a graph, and its rows are no more than those
    of ``activation_bytes``.

    Args:
        buckets: numbers of blocks that are captured.
    """
    if not buckets:
        return 0
    largest, width = max(buckets), kernel_dim(config.head_dim)
    # What is kept for good: the answers of attention, and what the head takes.
    kept = (config.num_heads * width + config.hidden_size) * NUMBER_BYTES[number_format]
    tensors = largest * block_tokens * (_bytes_per_row(config, number_format) + kept)
    partial = graph_workspace_bytes(
        config.num_heads, config.num_kv_heads, width, largest, block_tokens
    )
    return int((tensors + partial) * _ROUNDING) + len(buckets) * _GRAPH_BYTES


def _bytes_per_row(config: ModelConfig, number_format: str) -> int:
    """Bytes a packed row at the layer's widest place.

    In the MLP: the row and its norm, before and after, what attention gave, gate and up, their
    product and what comes of it. In attention: the row and its norm, q, k, v and the answers.
    """
    hidden, mlp = config.hidden_size, config.mlp_size
    q = config.num_heads * config.head_dim
    kv = 2 * config.num_kv_heads * config.head_dim
    in_mlp = 5 * hidden + q + 3 * mlp
    in_attention = 2 * hidden + 2 * (q + kv) + q
    return max(in_mlp, in_attention) * NUMBER_BYTES[number_format]
