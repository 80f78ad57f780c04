"""Iterations of every kind, run before the port opens: what is loaded, compiled or grown lazily.

Decides which iterations stand for all that may come: prefills, their decodes, both together,
noise, passes without pages, and the largest that can be; of such numbers of rows that each kernel
of attention is chosen once, as CUDA loads kernels when they are first launched. Their outcomes are
thrown away, except that logits which are not numbers stop the start. Called by ``start``, and by
``process`` on the thread that will run them, for which libraries make things of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sangam_core.decoding import Decoding
from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS
from sangam_core.wire import BlockKey
from sangam_worker.plan import Outcome, Pass, Plan
from sangam_worker.progress import Reports
from sangam_worker.sizing import LargestIteration

_PREFILL_TOKENS = 4096
"""Of one prefill in the largest iteration: memory goes by rows, time by lengths as well."""


_MIDDLE_TOKENS = 128
"""FA2's tiles are of 16, 64 or 128 rows (times the heads that share K and V)."""

_LONG_TOKENS = 512
"""Prefills from which FA3 is taken, and contexts that FA2 splits for one decode."""

_FEW_MASKS = (1, 8)
"""Rows of the last layer in a block that is nearly done: tiles of 16, and where heads share, of
64."""


class Limits(Protocol):
    """What the warm-up needs to know of a model."""

    @property
    def mask_id(self) -> int:
        """The mask token."""
        ...

    @property
    def max_sequence_tokens(self) -> int:
        """Length of the longest sequence."""
        ...


class Runs(Protocol):
    """What the warm-up needs of an engine."""

    def execute(self, plan: Plan) -> Outcome:
        """Run an iteration."""
        ...


@dataclass(frozen=True, slots=True)
class WarmUp:
    """An iteration by what it stands for. ``has_numbers``: its logits must be numbers."""

    name: str
    passes: tuple[Pass, ...]
    has_numbers: bool = True

    @property
    def plan(self) -> Plan:
        """As the scheduler would have it."""
        decodes = sum(len(each.positions) for each in self.passes if not each.is_whole_sequence)
        prefills = sum(len(each.positions) for each in self.passes if each.is_whole_sequence)
        return Plan(0, self.passes, decodes, prefills)


class WarmUps:
    """The iterations for one model.

    Args:
        total_pages: of the pool, which nobody uses yet: passes share pages.
    """

    def __init__(self, config: Limits, block_length: int, total_pages: int) -> None:
        self._config, self._block_length = config, block_length
        self._most_tokens = min(config.max_sequence_tokens, total_pages * PAGE_TOKENS)
        # Two blocks, or what the pool holds: then one is cut.
        self._short = min(2 * block_length, self._most_tokens)
        self._middle = max(self._short, min(_MIDDLE_TOKENS, self._most_tokens))
        self._long = max(self._short, min(_LONG_TOKENS, self._most_tokens))

    def of_every_kind(self) -> tuple[WarmUp, ...]:
        """Small ones, in an order in which pages are written before they are read."""
        prefill, decode = self._pass(self._short, "prefill"), self._decode("decode")
        long = self._pass(self._long, "long prefill")
        noisy = Decoding(temperature=1.0, top_p=0.9)
        few_masks = [
            self._pass(self._long, "long decode", is_decode=True, most_masks=number)
            for number in _FEW_MASKS
        ]
        return (
            WarmUp("a prefill", (prefill,)),
            WarmUp("a decode", (decode,)),
            WarmUp("both", (decode, prefill)),
            WarmUp("a middle prefill", (self._pass(self._middle, "middle prefill"),)),
            WarmUp("a long prefill", (long,)),
            *(WarmUp("a long decode", (each,)) for each in few_masks),
            WarmUp("a long prefill beside a decode", (decode, long)),
            WarmUp("noise", (self._pass(self._short, "noise", decoding=noisy),)),
            WarmUp("no cache", (self._pass(self._short, "alone", has_pages=False),)),
            WarmUp("no cache, long", (self._pass(self._long, "long alone", has_pages=False),)),
        )

    def largest(self, iteration: LargestIteration) -> WarmUp:
        """As many rows and logits as an iteration can have; what is in them does not matter.

        Decodes have most logits a row; as few as possible give way to prefills, which have most
        rows a pass. One does in any case: no graph is to carry this, which has memory of its own
        (and no room for blocks that share their pages).
        """
        own = self._block_length
        prefill_tokens = min(_PREFILL_TOKENS, self._most_tokens)
        num_prefills = 1
        while (
            num_prefills < iteration.num_blocks
            and (iteration.num_blocks - num_prefills) * own + num_prefills * prefill_tokens
            < iteration.num_rows
        ):
            num_prefills += 1
        num_decodes = min(iteration.num_blocks - num_prefills, iteration.num_rows // own)
        passes = [self._decode(f"decode {number}") for number in range(num_decodes)]
        rows_left = iteration.num_rows - sum(len(each.positions) for each in passes)
        for number in range(num_prefills):
            tokens = min(prefill_tokens, rows_left)
            if tokens > 0:
                passes.append(self._pass(tokens, f"prefill {number}"))
            rows_left -= tokens
        return WarmUp("the largest iteration", tuple(passes), has_numbers=False)

    def _decode(self, name: str) -> Pass:
        return self._pass(self._short, name, is_decode=True)

    def _pass(
        self,
        total_tokens: int,
        name: str,
        *,
        is_decode: bool = False,
        has_pages: bool = True,
        most_masks: int | None = None,
        decoding: Decoding | None = None,
    ) -> Pass:
        block = range(max(0, total_tokens - self._block_length), total_tokens)
        rows = block if is_decode else range(total_tokens)
        num_pages = -(-total_tokens // PAGE_TOKENS) if has_pages else 0
        return Pass(
            key=BlockKey(request_id=name, block=0),
            positions=rows,
            tokens=[self._config.mask_id if row in block else 0 for row in rows],
            sees=total_tokens,
            total_tokens=total_tokens,
            pages=tuple(range(num_pages)),
            block=block,
            block_index=0,
            step=1,  # in step 0 Dream's first position alone commits, and needs logits
            masked=tuple(block[:most_masks]),
            initial_masks=len(block),
            carry=0.0,
            decoding=Decoding() if decoding is None else decoding,
            is_whole_sequence=not is_decode,
        )


def run_all(engine: Runs, warm_ups: Sequence[WarmUp], reports: Reports) -> None:
    """Run them, with progress.

    Raises:
        ConfigurationError: logits are not numbers: broken weights, or a faulty device.
    """
    with reports.task("warm-up passes", len(warm_ups), "kinds") as advance:
        for each in warm_ups:
            outcome = engine.execute(each.plan)
            errors = [item.error for item in outcome.passes if item.error is not None]
            if errors and each.has_numbers:
                raise ConfigurationError(f"the model does not work: in {each.name}, {errors[0]}")
            advance(1)
