"""Decides how the small model is trained: optimiser, schedule, averaging, checkpoints.

Run by hand: ``python -m sangam_worker.small_model.train --out DIR``. With the defaults it repeats
the run that made the shipped weights (same seed and batches; the last bits depend on the machine).
``--resume`` goes on from the state file that every save writes next to the model.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sangam_worker.small_model.batches import Batch, batches
from sangam_worker.small_model.export import write_model
from sangam_worker.small_model.model import Llada, Shape
from sangam_worker.small_model.muon import StackedMuon

# Share of the full rates by step, linear between: the course the shipped weights took.
RATES = (
    (0, 0.01),
    (100, 1.0),
    (3249, 1.0),
    (3250, 0.4),
    (7500, 0.4),
    (8249, 0.2),
    (8250, 0.7),
    (10500, 0.7),
    (12499, 0.0),
    (12500, 0.35),
    (16000, 0.0),
)


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run besides the code."""

    seed: int = 1
    steps: int = 16000
    batch_tokens: int = 3200
    muon_rate: float = 4e-3
    muon_decay: float = 0.01
    adam_rate: float = 4e-3
    average: float = 0.995  # of the weights that are saved
    save_every: int = 250


class Trainer:
    """The network, its two optimisers and the running average of its weights."""

    def __init__(self, shape: Shape, plan: Plan, compiled: bool = False) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.step = plan, 0
        self.net = Llada(shape)
        self.hidden = torch.compile(self.net.hidden, dynamic=True) if compiled else self.net.hidden
        self.mean = {name: value.clone() for name, value in self.net.state_dict().items()}
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.net.named_parameters():
            inner = parameter.dim() == 2 and "blocks" in name
            (matrices if inner else others).append(parameter)
        self.muon = StackedMuon(matrices)
        self.adam = torch.optim.AdamW(
            others, lr=plan.adam_rate, betas=(0.9, 0.98), weight_decay=0.0
        )

    def _rate(self) -> float:
        """Share of the full rates at this step."""
        for (first, low), (last, high) in itertools.pairwise(RATES):
            if first <= self.step < last:
                return low + (high - low) * (self.step - first) / (last - first)
        return 0.0

    def train_step(self, batch: Batch) -> float:
        """One update; returns the loss."""
        share = self._rate()
        for group in self.adam.param_groups:
            group["lr"] = self.plan.adam_rate * share
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.muon.step(self.plan.muon_rate * share, self.plan.muon_decay)
        self.adam.step()
        self.net.zero_grad(set_to_none=True)
        self.step += 1
        keep = min(self.plan.average, self.step / (self.step + 10))
        with torch.no_grad():
            values = list(self.net.state_dict().values())
            torch._foreach_lerp_(list(self.mean.values()), values, 1.0 - keep)
        return float(loss.detach())

    def _loss(self, batch: Batch) -> Tensor:
        masked = batch.weights > 0
        with torch.autocast("cpu", torch.bfloat16):
            hidden, _ = self.hidden(batch.ids, batch.key_bias)
            scores = self.net.logits(hidden[masked])
        each = F.cross_entropy(scores.float(), batch.targets[masked], reduction="none")
        weights = batch.weights[masked]
        return (each * weights).sum() / weights.sum()

    def save(self, folder: Path) -> None:
        """Write the averaged weights as a model folder, and the state to resume from."""
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder, self.net.shape, self.mean)
        state = {
            "step": self.step,
            "net": self.net.state_dict(),
            "mean": self.mean,
            "muon": self.muon.buffers,
            "adam": self.adam.state_dict(),
        }
        torch.save(state, folder / "state.tmp")
        (folder / "state.tmp").rename(folder / "state.pt")

    def load(self, path: Path) -> None:
        """Go on from a saved state."""
        state = torch.load(path, weights_only=True)
        self.step, self.mean = state["step"], state["mean"]
        self.net.load_state_dict(state["net"])
        self.muon.buffers = state["muon"]
        self.adam.load_state_dict(state["adam"])


def say(line: str) -> None:
    """Show a line of progress at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(trainer: Trainer, folder: Path) -> None:
    """Train to the end of the plan, showing progress and saving now and then."""
    plan, began, losses, seen = trainer.plan, time.monotonic(), [], 0
    stream: Iterator[Batch] = batches(plan.seed, trainer.step, plan.batch_tokens)
    while trainer.step < plan.steps:
        batch = next(stream)
        losses.append(trainer.train_step(batch))
        seen += batch.ids.numel()
        if trainer.step % 50 == 0:
            seconds = time.monotonic() - began
            mean = sum(losses) / len(losses)
            say(
                f"step {trainer.step}/{plan.steps} loss {mean:.4f} "
                f"{seconds:.0f} s, {seen / seconds:.0f} tokens/s"
            )
            losses = []
        if trainer.step % plan.save_every == 0 or trainer.step == plan.steps:
            trainer.save(folder)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--resume", type=Path, help="state.pt to go on from")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; faster")
    for name in ("width", "layers", "heads", "mlp"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape, name))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    shape = Shape(width=given.width, layers=given.layers, heads=given.heads, mlp=given.mlp)
    plan = Plan(seed=given.seed, steps=given.steps)
    trainer = Trainer(shape, plan, given.compile)
    if given.resume:
        trainer.load(given.resume)
    run(trainer, given.out)


if __name__ == "__main__":
    main()
