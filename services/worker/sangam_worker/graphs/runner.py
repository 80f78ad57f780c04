"""Runs decode-only iterations from graphs: picks the bucket, feeds it, replays it.

Decides what has to be written anew, and planned anew by the attention backend, before a replay:
where the same blocks pass again, their tokens alone. The LM head runs on all rows of a bucket, as
which rows can commit changes from pass to pass; the sampler picks. Called by ``engine``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sangam_core.rules import Family
from sangam_worker.attention.layout import Int64s
from sangam_worker.attention.protocol import Attention, AttentionBackend
from sangam_worker.graphs.buckets import bucket_of, is_capturable
from sangam_worker.graphs.capture import Capture, Replay
from sangam_worker.graphs.static_batch import LayoutKey, StaticBatch, layout_key
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.transformer import Transformer
from sangam_worker.packing import rows_that_predict
from sangam_worker.plan import Pass

Progress = Callable[[int, int], None]
"""Called with how many of how many graphs are captured."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """One captured size. ``planned``: the layout that its attention was planned with last."""

    batch: StaticBatch
    attention: Attention
    logits: Tensor
    replay: Replay
    planned: LayoutKey | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An iteration whose arrays are on their way to the device."""

    bucket: _Bucket
    passes: Sequence[Pass]
    family: Family

    def replay(self) -> Tensor:
        """Issue the pass: its logits ``[rows, vocab]``, valid until the next one's replay."""
        self.bucket.replay()
        return self.bucket.logits

    @property
    def at(self) -> Int64s:
        """Rows of the logits that predict each pass's committable positions, in order.

        To be asked for behind the replay: the host may take its time then.
        """
        return rows_that_predict(self.passes, self.family)


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

    @torch.inference_mode()
    def capture(self, capture: Capture, progress: Progress) -> None:
        """Capture every bucket, the largest first: the others then share its memory.

        Runs each pass at least once, on the scratch page. Kernels that are not compiled yet are
        compiled here. Positions up to the longest sequence are there: a table that grew later would
        leave the graphs with the memory of the old one.
        """
        logits = None
        for number, num_blocks in enumerate(reversed(self._sizes)):
            progress(number, len(self._sizes))
            batch = StaticBatch(
                num_blocks,
                self._block_tokens,
                self._pool.total_pages,
                self._pool.scratch_page,
                self._pool.device,
            )
            if logits is None:
                # Not the graphs' own: whatever graph is captured next would use their memory.
                logits = self._logits(len(batch.tokens))
            self._buckets[num_blocks] = self._captured(capture, batch, logits[: len(batch.tokens)])
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
        return Prepared(bucket, passes, self._config.family)

    def _feed(self, bucket: _Bucket, passes: Sequence[Pass]) -> None:
        batch, key = bucket.batch, layout_key(passes)
        batch.feed(passes)
        if key == bucket.planned:
            batch.send(None)
            return
        bucket.planned = None  # until all has gone well
        layout = batch.lay_out(passes)
        batch.send(layout)
        bucket.attention.plan(layout)
        bucket.planned = key

    def _captured(self, capture: Capture, batch: StaticBatch, logits: Tensor) -> _Bucket:
        attention = self._attention.fixed(batch.fixed)
        attention.plan(batch.fixed.full)
        transformer = self._transformer

        def run() -> None:
            transformer.forward_every_row(batch.tokens, batch.positions, attention, logits)

        return _Bucket(batch, attention, logits, replay=capture(run))

    def _logits(self, num_rows: int) -> Tensor:
        shape = num_rows, self._config.vocab_size
        return torch.zeros(shape, dtype=self._pool.dtype, device=self._pool.device)
