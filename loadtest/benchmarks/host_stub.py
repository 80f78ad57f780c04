"""A host without a model: real scheduler, index arrays, sampler and rules over made-up candidates.

Decides what comes to it (``Case``) and how a device that computes nothing takes its time. In the
logits' place a kernel makes up a candidate a row, a tenth of them confident. Used by ``host_gap``.
"""

import asyncio
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from random import Random

import torch
from torch import Tensor

from sangam_core.decoding import Decoding, EosRule, Resume
from sangam_core.geometry import DEFAULT_BLOCK_LENGTH, PAGE_TOKENS, Geometry
from sangam_core.wire import BlockKey, BlockStart, KVSource, WireGeometry
from sangam_worker.block_state import BlockState, block_state_from
from sangam_worker.graphs.buckets import is_capturable
from sangam_worker.graphs.static_batch import LayoutKey, StaticBatch, layout_key
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.random_models import random_config
from sangam_worker.packing import pack, padded, rows_that_predict
from sangam_worker.plan import Outcome, Pass, Plan
from sangam_worker.sampling.sampler import Proposals, Sampler
from sangam_worker.scheduler import Scheduler

MODEL = "random:llada-8b"
CONTEXT_TOKENS = 1024
_LEAST_CONTEXT_TOKENS, _MOST_CONTEXT_TOKENS = 256, 2048
_LEAST_TAU_TOKENS, _TAU_TOKENS_A_BLOCK = 1024, 96
"""Of a colocated worker: what its decodes leave is what the prefills of its blocks need."""
_CONFIDENT_SHARE = 0.1
_LOCK_FREE = bytes(2**14)
"""Hashing as much lets go of the interpreter, for some 10 us."""
_ELSEWHERE = KVSource(worker_id="elsewhere", epoch="none", url="http://elsewhere")


class Case(StrEnum):
    """What runs on the worker, and what takes the place of a block that has ended."""

    LOCKSTEP = "lockstep"
    """Decodes of one length that began together, so that most iterations have the same blocks: a
    host's best case."""
    DECODE = "decode"
    """A decode worker: blocks of mixed lengths and at different passes; about a tenth of them
    ends in each iteration, and as many come whose KV was transferred."""
    COLOCATED = "colocated"
    """The same, but every second block is prefilled here, in iterations with decodes beside."""


class MadeUp:
    """Candidates without logits: every call goes on in a long list of figures."""

    def __init__(self, vocab_size: int, num_rows: int = 100_003) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab_size - 1, (num_rows,), generator=generator)
        confidences = torch.rand(num_rows, generator=generator).double()
        confidences = confidences * 0.9 / (1 - _CONFIDENT_SHARE)  # so many are above 0.9
        self._figures = torch.stack((tokens.double(), confidences.clamp(max=1.0)), 1)
        self._at = 0

    def __call__(self, logits: Tensor, mask_id: int, num_columns: int) -> Tensor:
        """The next rows."""
        if self._at + len(logits) > len(self._figures):
            self._at = 0
        self._at += len(logits)
        return self._figures[self._at - len(logits) : self._at]


class Blocks:
    """Makes the blocks of a case."""

    def __init__(self, config: ModelConfig, case: Case = Case.LOCKSTEP) -> None:
        self._config, self._case = config, case
        self._numbers, self._random = count(), Random(0)
        most_tokens = CONTEXT_TOKENS if case is Case.LOCKSTEP else _MOST_CONTEXT_TOKENS
        self._tokens = [self._random.randrange(1000) for _ in range(most_tokens)]
        self.most_pages = most_tokens // PAGE_TOKENS

    def next(self) -> BlockState:
        """One more."""
        length, number = DEFAULT_BLOCK_LENGTH, next(self._numbers)
        if self._case is Case.LOCKSTEP:
            return self._block(number, CONTEXT_TOKENS, length, is_moved=True)
        context = self._random.randrange(_LEAST_CONTEXT_TOKENS, _MOST_CONTEXT_TOKENS)
        is_moved = self._case is Case.DECODE or number % 2 == 0
        num_masks = self._random.randint(1, length) if is_moved else length
        return self._block(number, context, num_masks, is_moved=is_moved)

    def _block(self, number: int, context: int, num_masks: int, *, is_moved: bool) -> BlockState:
        config, length = self._config, DEFAULT_BLOCK_LENGTH
        ids = (*self._tokens[: context - num_masks], *[config.mask_id] * num_masks)
        start = BlockStart(
            key=BlockKey(request_id=f"request-{number:08}", block=0),
            worker_epoch="in-process",
            arrival_seconds=float(number),
            ids=ids,
            geometry=WireGeometry.of(Geometry(context - length, 1, length)),
            decoding=Decoding(eos_ids=config.eos_ids, eos_rule=EosRule.IGNORE),
            source=_ELSEWHERE if is_moved else None,
            resume=Resume(step=1, initial_masks=length) if is_moved else None,
        )
        return block_state_from(start, config.mask_id, config.vocab_size)


class Arrays:
    """A graph's arrays, written as ``graphs.runner`` does."""

    def __init__(self, num_blocks: int, total_pages: int) -> None:
        device = torch.device("cpu")
        self._batch = StaticBatch(
            num_blocks, DEFAULT_BLOCK_LENGTH, total_pages + 1, total_pages, device
        )
        self._planned: LayoutKey | None = None

    def write(self, passes: Sequence[Pass]) -> None:
        """Write what an iteration of decodes changes, and copy it."""
        key = layout_key(passes)
        self._batch.feed(passes)
        self._batch.send(None if key == self._planned else self._batch.lay_out(key))
        self._planned = key


@dataclass(frozen=True, slots=True)
class Host:
    """The parts that both measurements are made of."""

    config: ModelConfig
    blocks: Blocks
    sampler: Sampler
    scheduler: Scheduler
    arrays: Arrays
    logits: Tensor

    @classmethod
    def build(cls, num_blocks: int, case: Case = Case.LOCKSTEP) -> "Host":
        """For so many blocks at a time."""
        config = random_config(MODEL)
        blocks = Blocks(config, case)
        pages = (num_blocks + 1) * blocks.most_pages
        tau_tokens = max(_LEAST_TAU_TOKENS, _TAU_TOKENS_A_BLOCK * num_blocks)
        return cls(
            config,
            blocks,
            Sampler(config, torch.bfloat16, MadeUp(config.vocab_size)),
            Scheduler(mask_id=config.mask_id, total_pages=pages, tau_tokens=tau_tokens),
            Arrays(num_blocks, pages),
            torch.empty((num_blocks * DEFAULT_BLOCK_LENGTH, 1)),
        )

    def write(self, plan: Plan) -> None:
        """What the engine writes for an iteration: its graph's arrays, or where none carries it
        those of a batch packed anew."""
        if _has_graph(plan):
            self.arrays.write(plan.passes)
        else:
            pack(plan.passes, self.config.family)

    def proposals(self, plan: Plan) -> Proposals:
        """What the sampler asks the device for; the device answers at once."""
        if not _has_graph(plan):
            return self.sampler.launch(self.logits, plan.passes)
        # Issued behind the replay, as the head's rows are.
        num_rows = len(padded(rows_that_predict(plan.passes, self.config.family)))
        return self.sampler.launch(self.logits[:num_rows], plan.passes)


def _has_graph(plan: Plan) -> bool:
    return is_capturable(plan.passes, DEFAULT_BLOCK_LENGTH)


class StubDevice:
    """An engine whose device takes a fixed time for everything.

    Args:
        is_spun: wait for it as CUDA does, on a core of one's own, which then is as warm as there;
            otherwise asleep.

    Attributes:
        gaps: seconds that the device stood still before each iteration. busy: of these, seconds
            that the thread computed: what else runs on the machine disturbs them less.
    """

    def __init__(
        self, host: Host, device_seconds: float, num_iterations: int, *, is_spun: bool
    ) -> None:
        self._host = host
        self._is_spun = is_spun
        self._device_seconds = device_seconds
        self._num_iterations = num_iterations
        self._ended: tuple[float, float] | None = None
        self.gaps: list[float] = []
        self.busy: list[float] = []
        self.is_done = threading.Event()

    def launch(self, plan: Plan) -> "StubLaunch":
        """Write the arrays; the device begins. Then ask for candidates behind the pass."""
        self._host.write(plan)
        now, busy = time.perf_counter(), time.thread_time()
        if self._ended is not None:
            self.gaps.append(now - self._ended[0])
            self.busy.append(busy - self._ended[1])
        if len(self.gaps) == self._num_iterations:
            self.is_done.set()
        until = now + self._device_seconds
        return StubLaunch(self, plan, self._host.proposals(plan), until)

    def wait(self, until: float) -> None:
        """Until the device has nothing to do any more; the interpreter is free meanwhile."""
        if self._is_spun:
            while time.perf_counter() < until:
                hashlib.sha256(_LOCK_FREE)
        else:
            time.sleep(max(0.0, until - time.perf_counter()))
        self._ended = time.perf_counter(), time.thread_time()


@dataclass(frozen=True, slots=True)
class StubLaunch:
    """An iteration that the device takes its time over."""

    device: StubDevice
    plan: Plan
    proposals: Proposals
    until: float
    device_seconds: None = None

    def outcome(self) -> Outcome:
        """Wait, then apply the rules."""
        self.device.wait(self.until)
        return Outcome(self.plan.iteration, self.proposals.outcomes())


class EventLoop:
    """An event loop on a thread of its own, as a worker has it."""

    def __enter__(self) -> asyncio.AbstractEventLoop:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self._loop

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
