"""The float32 engine that others are held against, and by how much they may be off.

Builds it and the perturbed ones (``rounding``) from a model's folder. Called by ``forcing``,
``engines`` and tests.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.plan import Plan
from sangam_worker.sampling.rules import committable
from sangam_worker.verify.rounding import Errors, NumberFormat, perturbed_operators

NUM_PERTURBED = 4
"""Engines from which the expected error of a row is estimated. With four, the estimate of a row is
off by a factor of two now and then, which ``ROW_LIMIT`` allows for."""

ROW_LIMIT = 5.0
"""Largest error of a row's logits (root mean square) beside that of the perturbed engines."""


class Reference:
    """A float32 engine on a CPU, and engines like it with a number format's errors.

    Args:
        kind: how far the engine under test may be from float32.
        total_pages: of its pool, which is to have as many.
    """

    def __init__(self, model: Path, kind: NumberFormat, total_pages: int) -> None:
        self.engine = load_engine(str(model), total_pages=total_pages)
        self._perturbed: Sequence[tuple[Engine, Errors]] = (
            [] if kind.is_exact else _perturbed(model, kind, total_pages)
        )

    def expected(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Run an iteration: its logits, and the root mean square by which a row may be off.

        Returns:
            float64 ``[candidates, vocab]`` and ``[candidates]`` (zeros where nothing may be off).
        """
        rows = self.candidates(self.engine.forward(plan), plan)
        squares = rows.new_zeros(len(rows))
        for engine, source in self._perturbed:
            own = self.candidates(engine.forward(plan), plan)
            own = source.of_head(own, self.engine.model_config.hidden_size)
            squares += row_errors(own, rows).square()
        return rows, (squares / max(1, len(self._perturbed))).sqrt()

    def candidates(self, logits: Tensor, plan: Plan) -> Tensor:
        """An engine's logits without padding rows, float64 on the host."""
        family = self.engine.model_config.family
        num_rows = sum(len(committable(item, family)) for item in plan.passes)
        return logits[:num_rows].double().cpu()


def row_errors(rows: Tensor, expected: Tensor) -> Tensor:
    """Root mean square by row, NaN where an entry is."""
    return (rows - expected).square().mean(-1).sqrt()


def _perturbed(model: Path, kind: NumberFormat, total_pages: int) -> list[tuple[Engine, Errors]]:
    found = []
    for seed in range(NUM_PERTURBED):
        operators, errors = perturbed_operators(kind, seed)
        engine = load_engine(str(model), total_pages=total_pages, operators=operators)
        found.append((engine, errors))
    return found
