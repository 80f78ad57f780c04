"""Decides what the model card may claim: accuracy and tokens per pass on held-out questions.

Run by hand: ``python -m sangam_worker.small_model.evaluate [--model DIR]``. Decodes as the worker
does by default (dual cache, threshold 0.9, blocks of 32, greedy) in float32.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from sangam_worker.small_model import tokens
from sangam_worker.small_model.decode import Decoded, decode
from sangam_worker.small_model.export import read_model
from sangam_worker.small_model.material import (
    MAKERS,
    Item,
    Message,
    dialogue,
    held_out_items,
    is_right,
)
from sangam_worker.small_model.model import Llada

SHIPPED = Path(str(files("sangam_core"))) / "small_model"


@dataclass
class Score:
    """Sums over the decoded questions of one task."""

    asked: int = 0
    right: int = 0
    text_tokens: int = 0
    passes: int = 0
    blocks: int = 0
    most_passes: int = 0

    def add(self, result: Decoded, right: bool) -> None:
        """Count one decoded answer."""
        self.asked += 1
        self.right += right
        self.text_tokens += result.text_tokens
        self.passes += result.passes
        self.blocks += result.blocks
        self.most_passes = max(self.most_passes, result.passes)

    def line(self, task: str, length: int) -> str:
        """One row of the printed table."""
        asked = max(1, self.asked)
        return (
            f"{task:10} L={length:<4} right {self.right}/{self.asked} = {self.right / asked:6.1%}  "
            f"tokens/pass {self.text_tokens / max(1, self.passes):5.2f}  "
            f"passes/answer {self.passes / asked:5.2f} (most {self.most_passes})  "
            f"blocks/answer {self.blocks / asked:.2f}"
        )


def prompt_of(item: Item, plain: bool, rng: random.Random) -> list[int]:
    """The question alone, or in a dialogue with a system message or an earlier turn."""
    messages = [Message("user", item.question)] if plain else dialogue(item, rng)
    while not plain and len(messages) == 1:
        messages = dialogue(item, rng)
    return tokens.encode_prompt(messages)


def score_task(net: Llada, task: str, length: int, count: int, plain: bool, show: int = 0) -> Score:
    """Decode held-out questions of one task; print up to ``show`` wrong answers."""
    score = Score()
    rng = random.Random(f"prompts {task}")
    for item in held_out_items(task, count):
        if len(tokens.encode_text(item.answer)) > length:
            continue
        result = decode(net, prompt_of(item, plain, rng), length)
        right = is_right(task, item.answer, result.text)
        score.add(result, right)
        if not right and score.asked - score.right <= show:
            say(f"  {item.question!r}\n    right {item.answer!r}\n    given {result.text!r}")
    return score


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read the command line and print one line per task and buffer length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--count", type=int, default=200, help="questions per task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--tasks", nargs="+", default=list(MAKERS))
    parser.add_argument(
        "--dialogue", action="store_true", help="add system message or earlier turn"
    )
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    net = read_model(given.model)
    for task in given.tasks:
        for length in given.lengths:
            score = score_task(net, task, length, given.count, not given.dialogue, given.show)
            if score.asked:
                say(score.line(task, length))


if __name__ == "__main__":
    main()
