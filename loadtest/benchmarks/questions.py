"""The shipped model's held-out questions as cases for the engine, and whether answers are right.

The same questions as ``sangam_worker.small_model.evaluate`` asks, decoded as the worker does by
default. Called by ``fp8_accuracy``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sangam_core.decoding import Decoding
from sangam_core.geometry import Geometry
from sangam_worker.small_model import tokens
from sangam_worker.small_model.material import MAKERS, Item, Message, held_out_items, is_right
from sangam_worker.verify import Case

BLOCK_LENGTH = 32
NUM_BLOCKS = 4
"""The longest answers have four."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question and how to ask it."""

    item: Item
    case: Case

    def is_right(self, ids: Sequence[int]) -> bool:
        """Whether the tokens behind the prompt are a right answer."""
        return is_right(self.item.task, self.item.answer, tokens.decode(ids))


def questions(num_per_task: int) -> list[Question]:
    """Up to so many of each task."""
    return [
        Question(item, _case(f"{task}-{number}", item))
        for task in MAKERS
        for number, item in enumerate(held_out_items(task, num_per_task))
    ]


def _case(name: str, item: Item) -> Case:
    prompt_ids = tokens.encode_prompt([Message("user", item.question)])
    return Case(
        id=name,
        family="llada",
        model=Path("small"),
        mask_id=tokens.MASK,
        prompt_ids=tuple(prompt_ids),
        geometry=Geometry(len(prompt_ids), NUM_BLOCKS, BLOCK_LENGTH),
        decoding=Decoding(eos_ids=(tokens.EOS,)),
        output_ids=(),
        num_passes=0,
        forwards=(),
    )
