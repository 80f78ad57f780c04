"""Runs decode-only iterations from graphs: picks the bucket, feeds it, replays it.

Decides what has to be written anew, and planned anew by the attention backend, before a replay:
where the same blocks pass again, their tokens alone. A graph ends in front of the LM head, which is
issued behind it for the rows that can commit: those change from pass to pass, and are half of all
on average (of 32 blocks the head takes 1.6 ms). Called by ``engine``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sangam_core.rules import Family
from sangam_worker.attention.protocol import Attention, AttentionBackend
from sangam_worker.graphs.buckets import bucket_of, is_capturable
from sangam_worker.graphs.capture import Capture, Replay
from sangam_worker.graphs.choice import fastest_kernel
from sangam_worker.graphs.static_batch import LayoutKey, StaticBatch, layout_key
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.transformer import Transformer
from sangam_worker.packing import padded, rows_that_predict
from sangam_worker.plan import Pass
from sangam_worker.uploads import sent_together

Progress = Callable[[int, int], None]
"""Called with how many of how many graphs are captured."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """One captured size.

    Attributes:
        chosen: what was measured to be fastest, in words.
        normed: what the graph gives, ``[rows, hidden]``.
        planned: the layout that its attention was planned with last.
    """

    batch: StaticBatch
    chosen: dict[str, str]
    attention: Attention
    normed: Tensor
    replay: Replay
    planned: LayoutKey | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An iteration whose arrays are on their way to the device."""

    bucket: _Bucket
    passes: Sequence[Pass]
    family: Family
    transformer: Transformer

    def replay(self) -> Tensor:
        """Issue the pass: logits as of ``Transformer.forward``, padding rows at the end.

        What the head needs is made behind the replay: the host may take its time then.
        """
        bucket = self.bucket
        bucket.replay()
        rows = rows_that_predict(self.passes, self.family)
        if not len(rows):
            return self.transformer.no_logits
        (on_device,) = sent_together([padded(rows)], np.int64, bucket.normed.device)
        return self.transformer.logits_of(bucket.normed, on_device)


class GraphRunner:
    """The graphs of one model on one device.

    Args:
        buckets: numbers of blocks to capture. block_tokens: length of the blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        transformer: Transformer,
        kv_pool: KVPool,
        attention: AttentionBackend,
        buckets: Sequence[int],
        block_tokens: int,
    ) -> None:
        self._config, self._transformer, self._pool = config, transformer, kv_pool
        self._attention = attention
        self._sizes = sorted(set(buckets))
        self._block_tokens = block_tokens
        self._buckets: dict[int, _Bucket] = {}
        self._sent: torch.cuda.Event | None = None

    @property
    def chosen(self) -> dict[int, dict[str, str]]:
        """By numbers of blocks, what was measured to be fastest, and its share of a first choice's
        time: what attends, and what multiplies which weights.
        """
        return {size: self._buckets[size].chosen for size in sorted(self._buckets)}

    @torch.inference_mode()
    def capture(self, capture: Capture, progress: Progress, *, is_measured: bool) -> None:
        """Capture every bucket, the largest first: the others then share its memory.

        Runs each pass at least once, on the scratch page. Kernels that are not compiled yet are
        compiled here. Positions up to the longest sequence are there: a table that grew later would
        leave the graphs with the memory of the old one.

        Args:
            is_measured: see ``Engine.capture_graphs``.
        """
        normed = None
        for number, num_blocks in enumerate(reversed(self._sizes)):
            progress(number, len(self._sizes))
            batch = StaticBatch(
                num_blocks,
                self._block_tokens,
                self._pool.total_pages,
                self._pool.scratch_page,
                self._pool.device,
            )
            if normed is None:
                # Not the graphs' own: whatever graph is captured next would use their memory.
                normed = self._normed(len(batch.tokens))
            own = normed[: len(batch.tokens)]
            kernel, told = self._attention.fixed_kernels(batch.fixed)[0], dict[str, str]()
            if is_measured:
                kernel, told = self._fastest(capture, batch)
            self._buckets[num_blocks] = self._captured(capture, batch, own, kernel, told)
        progress(len(self._sizes), len(self._sizes))

    def prepare(self, passes: Sequence[Pass]) -> Prepared | None:
        """Send an iteration's arrays; ``None`` where no graph carries it.

        The one before must be over.
        """
        if not is_capturable(passes, self._block_tokens):
            return None
        size = bucket_of(len(passes), self._sizes)
        if size is None or size not in self._buckets:
            return None
        if self._sent is not None:
            self._sent.synchronize()  # what the arrays hold has left for the device
        bucket = self._buckets[size]
        self._feed(bucket, passes)
        if self._pool.device.type == "cuda":
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()
        return Prepared(bucket, passes, self._config.family, self._transformer)

    def _feed(self, bucket: _Bucket, passes: Sequence[Pass]) -> None:
        batch, key = bucket.batch, layout_key(passes)
        batch.feed(passes)
        if key == bucket.planned:
            batch.send(None)
            return
        bucket.planned = None  # until all has gone well
        layout = batch.lay_out(key)
        batch.send(layout)
        bucket.attention.plan(layout)
        bucket.planned = key

    def _fastest(self, capture: Capture, batch: StaticBatch) -> tuple[str, dict[str, str]]:
        """What is measured to be fastest for a size: attention's kernel; all of it in words."""

        def measure(run: Callable[[], None]) -> float:
            return capture.seconds(capture(run))

        num_heads = self._config.num_heads
        kernel = fastest_kernel(self._attention, self._pool, batch, num_heads, measure)
        products = self._transformer.choose(len(batch.tokens), measure)
        return kernel.name, {"attention": str(kernel), **products}

    def _captured(
        self,
        capture: Capture,
        batch: StaticBatch,
        normed: Tensor,
        kernel: str,
        told: dict[str, str],
    ) -> _Bucket:
        attention = self._attention.fixed(batch.fixed, kernel)
        attention.plan(batch.send_full())
        transformer = self._transformer

        def run() -> None:
            transformer.forward_every_row(batch.tokens, batch.positions, attention, normed)

        return _Bucket(batch, told, attention, normed, replay=capture(run))

    def _normed(self, num_rows: int) -> Tensor:
        shape = num_rows, self._config.hidden_size
        return torch.zeros(shape, dtype=self._pool.dtype, device=self._pool.device)
