"""Builds each iteration: every decode, then whole prefills as the deficit token budget allows.

Owns the blocks on this worker, their order and their pages. Decides who runs; it neither
computes (engine) nor reads a clock (loop) nor talks to anyone (service). The worker's loop and
the simulator call it: ``next_plan`` and ``apply`` in turn, the rest in between. One thread.
"""

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from sangam_core.admission import (
    ADMISSION_POLICIES,
    DEFICIT,
    Candidate,
    admit,
    iteration_budget,
)
from sangam_core.answer import Completion, completion
from sangam_core.decoding import Commit, EosRule
from sangam_core.wire import BlockKey
from sangam_worker.block_state import BlockState, Stage
from sangam_worker.pages import PageAllocator
from sangam_worker.plan import Outcome, Pass, PassOutcome, Plan

UNBOUNDED = 2**31
"""As ``max_batch_blocks``: pages alone bound an iteration, as in the paper."""


class Progress(NamedTuple):
    """What one pass did for one block.

    Attributes:
        step: the pass's number. counts: False for a repeated prefill, which commits nothing.
        is_first_here: the block's first pass on this worker; its prefill load is off now.
        stage: where the block stands now; ``None`` when it has left the scheduler.
    """

    key: BlockKey
    step: int
    counts: bool
    commits: tuple[Commit, ...]
    carry: float
    completion: Completion
    is_first_here: bool
    stage: Stage | None


class Scheduler:
    """The worker's scheduler.

    Args:
        mask_id: the model's mask token.
        total_pages: the KV pool.
        tau_tokens: the token budget of an iteration (Algorithm 1).
        transferred_decode_share: while a prefill waits, a transferred decode that is younger
            joins only up to this share of tau, and of ``max_batch_blocks``. A deviation from the
            paper: a hybrid's decodes could otherwise hold D >= tau (or the whole batch) for ever,
            and Algorithm 1 admits nothing then. A decode that is older than the waiting prefill
            joins at once, and one that alone is over the share lets the idle rule admit the
            prefill first, so neither side starves.
        admission: which tau an iteration gets, by name (``sangam_core.admission``).
        max_batch_blocks: most passes of an iteration: what bounds its memory, where many short
            sequences fit the pages. A full batch holds prefills back as full pages do.
        max_batch_rows: most rows of transferred decodes, for the same reason: with the ``prefix``
            cache one feeds many blocks' rows.
    """

    def __init__(
        self,
        *,
        mask_id: int,
        total_pages: int,
        tau_tokens: int,
        transferred_decode_share: float = 0.75,
        admission: str = DEFICIT,
        max_batch_blocks: int = UNBOUNDED,
        max_batch_rows: int = UNBOUNDED,
    ) -> None:
        self.mask_id = mask_id
        self.tau_tokens = tau_tokens
        self.transferred_decode_share = transferred_decode_share
        self.max_batch_blocks = max_batch_blocks
        self.max_batch_rows = max_batch_rows
        self.pages = PageAllocator(total_pages)
        self.carried_tokens = 0
        self._budget = ADMISSION_POLICIES[admission]
        self._waiting_tokens = 0
        self._blocks: dict[BlockKey, BlockState] = {}
        self._waiting: list[BlockState] = []
        self._decodes: list[BlockState] = []
        self._parked: list[BlockState] = []
        self._running: list[BlockState] = []
        self._iteration = 0

    # -- what the service asks for --------------------------------------------------------

    def submit(self, state: BlockState) -> None:
        """Queue a block's whole-sequence pass, in request arrival order."""
        self._add(state)
        self._wait(state)

    def reserve(self, state: BlockState) -> bool:
        """Reserve pages for a block whose KV will arrive; False (nothing held) without room."""
        pages = self.pages.allocate(state.num_pages)
        if pages is None:
            return False
        self._add(state)
        state.stage, state.pages = Stage.ARRIVING, pages
        return True

    def arrived(self, key: BlockKey) -> None:
        """Every layer of a reserved block's KV is here: it may decode."""
        state = self._blocks[key]
        assert state.stage is Stage.ARRIVING, state.stage
        state.stage = Stage.PARKED
        insort(self._parked, state, key=_order)

    def pages_of(self, key: BlockKey) -> tuple[int, ...]:
        """The page table of a block that holds pages (transfers read or fill it)."""
        return self._blocks[key].pages

    def remove(self, key: BlockKey) -> bool:
        """Cancel or release a block; its pages are free at once, or after the running pass.

        Returns False when the block is not here (removing twice changes nothing).
        """
        state = self._blocks.get(key)
        if state is None:
            return False
        if state in self._running:
            state.is_cancelled = True
        else:
            self._drop(state)
        return True

    def keys(self) -> tuple[BlockKey, ...]:
        """Every block here."""
        return tuple(self._blocks)

    @property
    def num_waiting(self) -> int:
        """Blocks whose whole-sequence pass waits."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Blocks that take part in every iteration."""
        return len(self._decodes)

    @property
    def is_empty(self) -> bool:
        """Whether no block is here at all."""
        return not self._blocks

    # -- one iteration --------------------------------------------------------------------

    def next_plan(self) -> Plan | None:
        """The next iteration, or ``None`` when nothing can run now."""
        assert not self._running, "apply the outcome of the last plan first"
        self._unpark()
        decode_tokens = _num_rows(self._decodes)
        prefills = self._admit(decode_tokens)
        running = self._running = [*self._decodes, *prefills]
        if not running:
            return None
        self._iteration += 1
        return Plan(
            iteration=self._iteration,
            passes=tuple([self._pass(state) for state in running]),
            num_decode_tokens=decode_tokens,
            num_prefill_tokens=_num_rows(prefills),
        )

    def apply(self, outcome: Outcome) -> tuple[Progress, ...]:
        """Take in what an iteration committed; says what that did for each block.

        Blocks removed meanwhile, and those whose pass failed, are dropped now and not reported.
        """
        assert outcome.iteration == self._iteration, "outcomes come in the order of the plans"
        running, self._running = self._running, []
        progress = []
        for state, item in zip(running, outcome.passes, strict=True):
            if state.is_cancelled or item.error is not None:
                self._drop(state)
            else:
                progress.append(self._apply_pass(state, item))
        return tuple(progress)

    # -- internals ------------------------------------------------------------------------

    def _add(self, state: BlockState) -> None:
        assert state.key not in self._blocks, f"block {state.key} is here already"
        self._blocks[state.key] = state

    def _wait(self, state: BlockState) -> None:
        insort(self._waiting, state, key=_order)
        self._waiting_tokens += len(state.next_rows().fed)

    def _drop(self, state: BlockState) -> None:
        del self._blocks[state.key]
        if state.stage is Stage.WAITING:
            self._waiting.remove(state)
            self._waiting_tokens -= len(state.next_rows().fed)
        elif state.stage is Stage.DECODING:
            self._decodes.remove(state)
        elif state.stage is Stage.PARKED:
            self._parked.remove(state)
        self.pages.free(state.pages)
        state.pages = ()

    def _unpark(self) -> None:
        """Let transferred decodes join, in request arrival order."""
        if not self._parked:
            return
        decode_tokens = _num_rows(self._decodes)
        limit = self.transferred_decode_share * self.tau_tokens
        block_limit = self.transferred_decode_share * self.max_batch_blocks
        while self._parked and len(self._decodes) < self.max_batch_blocks:
            state = self._parked[0]
            cost = len(state.next_rows().fed)
            if self._decodes and decode_tokens + cost > self.max_batch_rows:
                return
            is_younger = bool(self._waiting) and state.order > self._waiting[0].order
            is_over = decode_tokens + cost > limit or len(self._decodes) + 1 > block_limit
            if is_younger and is_over and self._can_yield():
                return
            self._parked.pop(0)
            state.stage = Stage.DECODING
            self._decodes.append(state)
            decode_tokens += cost

    def _can_yield(self) -> bool:
        """Whether this iteration runs something when no transferred decode joins."""
        return bool(self._decodes) or self._waiting[0].num_pages <= self.pages.num_free

    def _admit(self, decode_tokens: int) -> list[BlockState]:
        tau_tokens = self._budget(self.tau_tokens, decode_tokens, self._waiting_tokens)
        candidates = self._candidates(tau_tokens, decode_tokens)
        admission = admit(self.carried_tokens, tau_tokens, decode_tokens, candidates)
        self.carried_tokens = admission.carried_tokens
        admitted = self._waiting[: admission.num_admitted]
        del self._waiting[: admission.num_admitted]
        for state in admitted:
            self._waiting_tokens -= len(state.next_rows().fed)
            pages = self.pages.allocate(state.num_pages)
            assert pages is not None, "a candidate's pages were counted as free"
            state.stage, state.pages = Stage.ADMITTED, pages
        return admitted

    def _candidates(self, tau_tokens: int, decode_tokens: int) -> list[Candidate]:
        """The waiting prefills from the head to the first that cannot be admitted."""
        budget = iteration_budget(self.carried_tokens, tau_tokens, decode_tokens)
        free = self.pages.num_free
        room = self.max_batch_blocks - len(self._decodes)
        candidates: list[Candidate] = []
        for state in self._waiting:
            cost = len(state.next_rows().fed)
            has_pages = state.num_pages <= free and len(candidates) < room
            candidates.append(Candidate(cost, has_pages))
            budget -= cost
            free -= state.num_pages
            if budget < 0 or not has_pages:
                break
        return candidates

    def _pass(self, state: BlockState) -> Pass:
        rows = state.next_rows()
        counts = state.resume is None
        return Pass(
            key=state.key,
            positions=rows.fed,
            tokens=_tokens_at(state.ids, rows.fed),
            sees=len(rows.sees),
            total_tokens=len(state.ids),
            pages=state.pages,
            block=state.block,
            block_index=state.key.block,
            step=state.step if counts else 0,
            masked=state.masks(self.mask_id) if counts else (),
            initial_masks=state.initial_masks,
            carry=state.carry,
            decoding=state.decoding,
            is_whole_sequence=rows.is_whole_sequence,
        )

    def _apply_pass(self, state: BlockState, item: PassOutcome) -> Progress:
        is_first_here = state.num_passes_here == 0
        state.num_passes_here += 1
        counts = not state.is_repeat
        step = state.step if counts else 0
        commits = item.commits
        if counts:
            state.overlay(commits)
            state.step += 1
            state.carry = item.carry
            if state.decoding.eos_rule is EosRule.FILL and (
                step > 0 or not state.strategy.keeps_kv
            ):
                commits = self._fill_behind_eos(state, commits)
        else:
            state.resume_now()
        done = self._completion(state)
        return Progress(
            key=state.key,
            step=step,
            counts=counts,
            commits=commits,
            carry=state.carry,
            completion=done,
            is_first_here=is_first_here,
            stage=self._move_on(state, done),
        )

    def _completion(self, state: BlockState) -> Completion:
        ends_early = state.decoding.eos_rule is EosRule.END
        done = completion(state.ids, state.block, self.mask_id, state.eos_ids if ends_early else ())
        if (
            done is Completion.BLOCK
            and state.decoding.eos_rule is EosRule.FILL
            and any(token in state.eos_ids for token in state.ids)
        ):
            return Completion.ANSWER
        return done

    def _move_on(self, state: BlockState, done: Completion) -> Stage | None:
        """Put the block where its next pass, its transfer, or nothing more awaits it."""
        if done is not Completion.NOTHING:
            self._drop(state)
            return None
        if state.hands_over:
            state.stage = Stage.HOLDING
        elif state.next_rows().is_whole_sequence:
            state.stage = Stage.WAITING
            self._wait(state)
        elif state.stage is not Stage.DECODING:
            state.stage = Stage.DECODING
            self._decodes.append(state)
        return state.stage

    def _fill_behind_eos(
        self, state: BlockState, commits: tuple[Commit, ...]
    ) -> tuple[Commit, ...]:
        """DInfer's early stop: everything behind the first EOS, prompt included, becomes EOS."""
        first = next((p for p, token in enumerate(state.ids) if token in state.eos_ids), None)
        if first is None:
            return commits
        eos = state.ids[first]
        filled = [p for p in state.block if p > first and state.ids[p] != eos]
        state.ids[first + 1 :] = [eos] * (len(state.ids) - first - 1)
        kept = [c for c in commits if c.position not in set(filled)]
        kept += [Commit(position=p, token=eos) for p in filled]
        return tuple(sorted(kept, key=lambda commit: commit.position))


def _order(state: BlockState) -> tuple[float, str, int, int]:
    return state.order


def _num_rows(states: Sequence[BlockState]) -> int:
    """Rows that the states' next passes feed."""
    return sum([len(state.next_rows().fed) for state in states])


def _tokens_at(ids: list[int], positions: Sequence[int]) -> list[int]:
    if isinstance(positions, range) and positions.step == 1:
        return ids[positions.start : positions.stop]
    return [ids[position] for position in positions]
