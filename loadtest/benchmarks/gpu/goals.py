"""What was wanted and what an earlier measurement reached, beside what this run found.

Decides the rows: the issue's goals for one H200 in bf16, and the marks of a straightforward fused
pass. Reads the results' file, whoever wrote it; a row whose part did not run says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Parts = Mapping[str, Mapping[str, Any]]
"""The results' parts, by name."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One row.

    Attributes:
        mark: what was measured before, None where nothing was. is_met: compares value and goal.
        find: the value and its floor; ``LookupError`` where it was not measured.
    """

    title: str
    unit: str
    mark: float | None
    goal: float
    find: Callable[[Parts], tuple[float, float | None]]
    is_at_least: bool = False

    def is_met(self, value: float) -> bool:
        """Whether a value is as good as wanted."""
        return value >= self.goal if self.is_at_least else value <= self.goal


def _pass_time(
    part: str, launch: str, prefill: int, blocks: int, context: int
) -> Callable[[Parts], tuple[float, float | None]]:
    def find(parts: Parts) -> tuple[float, float | None]:
        for line in parts[part]["found"]["lines"]:
            shape = (line["prefill_tokens"], line["decode_blocks"], line["context_tokens"])
            if line["launch"] == launch and shape == (prefill, blocks, context):
                return line["total_ms"], line["floor_ms"]
        raise LookupError(f"{part} has no such line")

    return find


def _sampler(model: str, rows: int) -> Callable[[Parts], tuple[float, float | None]]:
    def find(parts: Parts) -> tuple[float, float | None]:
        for line in parts[f"sampler {model}"]["found"]["lines"]:
            if line["rows"] == rows:
                return line["ms"], line["floor_ms"]
        raise LookupError(f"{rows} rows were not sampled")

    return find


def _field(part: str, name: str) -> Callable[[Parts], tuple[float, float | None]]:
    return lambda parts: (parts[part]["found"][name], None)


def _goals() -> list[Goal]:
    rows: list[Goal] = []
    decodes = {
        "llada-8b": {1: (5.45, 5.0), 8: (8.69, 7.8), 32: (30.8, 28.0)},
        "dream-7b": {1: (5.15, 4.8), 8: (7.8, 7.0), 32: (25.5, 24.0)},
    }
    prefills = {"llada-8b": (51.6, 49.0), "dream-7b": (48.5, 46.0)}
    samplers = {32: 0.04, 1024: 0.12}
    for model, by_blocks in decodes.items():
        for blocks, (mark, goal) in by_blocks.items():
            title = f"{model} decode pass, graph, context 1024, {blocks} blocks"
            find = _pass_time(f"decodes {model}", "graph", 0, blocks, 1024)
            rows.append(Goal(title, "ms", mark, goal, find))
    for model, (mark, goal) in prefills.items():
        find = _pass_time(f"prefills {model}", "eager", 2048, 0, 2048)
        rows.append(Goal(f"{model} prefill of 2048 tokens", "ms", mark, goal, find))
    for model in decodes:
        for count, mark in samplers.items():
            # "The same", as far as the mark's digits tell.
            goal = mark + 0.005
            rows.append(
                Goal(f"{model} sampler, {count} rows", "ms", mark, goal, _sampler(model, count))
            )
    gap = _field("cpu gap llada-8b", "gap_percent")
    rows.append(Goal("CPU gap of an iteration, llada-8b, 8 blocks", "%", None, 5.0, gap))
    ratio = _field("batch 1 step llada-8b", "ratio")
    title = "decode step at batch 1, context 2048: plain PyTorch over ours"
    rows.append(Goal(title, "x", 34 / 5.6, 6.0, ratio, is_at_least=True))
    return rows


GOALS = tuple(_goals())


def goals_table(parts: Parts) -> str:
    """A markdown table of all goals."""
    lines = ["| | here | floor | mark | goal | |", "|---|--:|--:|--:|--:|---|"]
    for goal in GOALS:
        mark = "-" if goal.mark is None else f"{goal.mark:.3g}"
        wanted = f"{'>=' if goal.is_at_least else '<='} {goal.goal:.3g} {goal.unit}"
        try:
            value, floor = goal.find(parts)
        except LookupError:
            cells = ["not measured", "", mark, wanted, ""]
        else:
            over = 100 * (value / goal.goal - 1)
            verdict = "met" if goal.is_met(value) else f"missed by {abs(over):.0f} %"
            told = "" if floor is None else f"{floor:.3g}"
            cells = [f"{value:.3g} {goal.unit}", told, mark, wanted, verdict]
        lines.append(f"| {goal.title} | {' | '.join(cells)} |")
    return "\n".join(lines)
