"""What was wanted and what an earlier measurement reached, beside what this run found.

Decides the rows: the issue's goals for one H200 in bf16, and the marks of a straightforward fused
pass; and what is told of a goal that is missed: what is furthest above its floor. Reads the
results' file, whoever wrote it; a row whose part did not run says so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Parts = Mapping[str, Mapping[str, Any]]
"""The results' parts, by name."""

DECODES = {
    "llada-8b": {1: (5.45, 5.0), 8: (8.69, 7.8), 32: (30.8, 28.0)},
    "dream-7b": {1: (5.15, 4.8), 8: (7.8, 7.0), 32: (25.5, 24.0)},
}
"""Mark and goal of decode passes at a context of 1,024, by blocks, in milliseconds."""
PREFILLS = {"llada-8b": (51.6, 49.0), "dream-7b": (48.5, 46.0)}
"""Of 2,048 tokens."""
SAMPLERS = {32: 0.04, 1024: 0.12}
"""Marks by rows, which are the goals too as far as their digits tell."""
_SAMPLER_DIGIT = 0.005
_GAP_PERCENT = 5.0
_STEP_MARK, _STEP_GOAL = 34 / 5.6, 6.0
_NAMES = {"llada-8b": "LLaDA-8B", "dream-7b": "Dream-7B"}


@dataclass(frozen=True, slots=True)
class Goal:
    """One row.

    Attributes:
        mark: what was measured before, None where nothing was. is_met: compares value and goal.
        find: the value and its floor; ``LookupError`` where it was not measured.
        explain: what dominates, as far as it is known.
    """

    title: str
    unit: str
    mark: float | None
    goal: float
    find: Callable[[Parts], tuple[float, float | None]]
    is_at_least: bool = False
    explain: Callable[[Parts], str] = lambda parts: ""

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


def _dominant(model: str, prefill: int, blocks: int, context: int) -> Callable[[Parts], str]:
    """The class of kernels furthest above its floor, in a pass as it was profiled."""

    def explain(parts: Parts) -> str:
        shape = (prefill, blocks, context)
        for line in parts.get(f"breakdown {model}", {}).get("found", {}).get("passes", ()):
            seen = (line["prefill_tokens"], line["decode_blocks"], line["context_tokens"])
            if seen == shape and line["by_class_ms"]:
                return _furthest(line["by_class_ms"], line["floor_ms"])
        return ""

    return explain


def _furthest(by_class: Mapping[str, float], floors: Mapping[str, float]) -> str:
    over = {name: ms - floors.get(name, 0.0) for name, ms in by_class.items()}
    worst = max(over, key=lambda name: over[name])
    told = f"{worst} {by_class[worst]:.3g} ms"
    return told + (f" over a floor of {floors[worst]:.3g}" if floors.get(worst) else "")


def _goals() -> list[Goal]:
    rows: list[Goal] = []
    for model, by_blocks in DECODES.items():
        for blocks, (mark, goal) in by_blocks.items():
            title = f"{model} decode pass, graph, context 1024, {blocks} blocks"
            find = _pass_time(f"decodes {model}", "graph", 0, blocks, 1024)
            explain = _dominant(model, 0, blocks, 1024)
            rows.append(Goal(title, "ms", mark, goal, find, explain=explain))
    for model, (mark, goal) in PREFILLS.items():
        find = _pass_time(f"prefills {model}", "eager", 2048, 0, 2048)
        explain = _dominant(model, 2048, 0, 2048)
        title = f"{model} prefill of 2048 tokens"
        rows.append(Goal(title, "ms", mark, goal, find, explain=explain))
    for model in DECODES:
        for count, mark in SAMPLERS.items():
            goal = mark + _SAMPLER_DIGIT
            rows.append(
                Goal(f"{model} sampler, {count} rows", "ms", mark, goal, _sampler(model, count))
            )
    gap = _field("cpu gap llada-8b", "gap_percent")
    rows.append(Goal("CPU gap of an iteration, llada-8b, 8 blocks", "%", None, _GAP_PERCENT, gap))
    ratio = _field("batch 1 step llada-8b", "ratio")
    title = "decode step at batch 1, context 2048: plain PyTorch over ours"
    rows.append(Goal(title, "x", _STEP_MARK, _STEP_GOAL, ratio, is_at_least=True))
    return rows


GOALS = tuple(_goals())


def goals_table(parts: Parts) -> str:
    """A markdown table of all goals."""
    lines = [
        "| | here | floor | over the floor | mark | goal | |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for goal in GOALS:
        mark = "-" if goal.mark is None else f"{goal.mark:.3g}"
        wanted = f"{'>=' if goal.is_at_least else '<='} {goal.goal:.3g} {goal.unit}"
        try:
            value, floor = goal.find(parts)
        except LookupError:
            cells = ["not measured", "", "", mark, wanted, ""]
        else:
            told = "" if floor is None else f"{floor:.3g}"
            ratio = "" if not floor else f"{value / floor:.2f}x"
            cells = [f"{value:.3g} {goal.unit}", told, ratio, mark, wanted]
            cells.append(_verdict(goal, value, parts))
        lines.append(f"| {goal.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(goal: Goal, value: float, parts: Parts) -> str:
    if goal.is_met(value):
        return "met"
    missed = f"missed by {abs(100 * (value / goal.goal - 1)):.0f} %"
    explained = goal.explain(parts)
    return f"{missed}: {explained}" if explained else missed


# The README's table


def readme_rows(parts: Parts) -> str:
    """Rows of the README's table "one H200, bf16", as measured, to be pasted."""
    return "\n".join(f"| {' | '.join(row)} |" for row in _readme_rows(parts))


def _readme_rows(parts: Parts) -> Iterator[Sequence[str]]:
    for model, by_blocks in DECODES.items():
        goals = [_goal(f"{model} decode pass, graph, context 1024, {n} blocks") for n in by_blocks]
        name = _NAMES[model]
        counts = " / ".join(map(str, by_blocks))
        yield _readme_row(f"{name} decode pass by graph, context 1,024: {counts}", goals, parts)
    goals = [_goal(f"{model} prefill of 2048 tokens") for model in PREFILLS]
    both = " / ".join(_NAMES[model] for model in PREFILLS)
    yield _readme_row(f"prefill of 2,048 tokens, {both}", goals, parts)
    goals = [_goal(f"llada-8b sampler, {count} rows") for count in SAMPLERS]
    yield _readme_row("sampler, 32 / 1,024 rows of LLaDA-8B", goals, parts)
    goals = [_goal("CPU gap of an iteration, llada-8b, 8 blocks")]
    yield _readme_row("CPU gap of an iteration at 8 blocks", goals, parts)
    goals = [_goal("decode step at batch 1, context 2048: plain PyTorch over ours")]
    title = "decode step at batch 1, context 2,048: plain PyTorch loop over ours"
    yield _readme_row(title, goals, parts)


def _goal(title: str) -> Goal:
    return next(goal for goal in GOALS if goal.title == title)


def _readme_row(title: str, goals: Sequence[Goal], parts: Parts) -> Sequence[str]:
    values, floors, verdicts = [], [], []
    for goal in goals:
        try:
            value, floor = goal.find(parts)
        except LookupError:
            values.append("-")
            floors.append("-")
            verdicts.append("not measured")
        else:
            values.append(f"{value:.3g}" + (f" ({value / floor:.2f}x)" if floor else ""))
            floors.append("" if floor is None else f"{floor:.3g}")
            verdicts.append(_verdict(goal, value, parts))
    unit = goals[0].unit
    marks = ["" if goal.mark is None else f"{goal.mark:.3g}" for goal in goals]
    wanted = [f"{goal.goal:.3g}" for goal in goals]
    told = f"{' / '.join(values)} {unit}: {'; '.join(verdicts)}"
    if len({*verdicts}) == 1:  # all met, or nothing measured
        told = f"{' / '.join(values)} {unit}, {verdicts[0]}"
    if {*values} == {"-"}:
        told = "not measured"
    return [title, *(_joined(each, unit) for each in (floors, marks, wanted)), told]


def _joined(values: Sequence[str], unit: str) -> str:
    """Numbers of one unit; nothing where there is none."""
    return f"{' / '.join(values)} {unit}" if {*values} - {"", "-"} else ""
