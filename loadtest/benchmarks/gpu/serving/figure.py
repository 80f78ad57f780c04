"""Draws latency against rate from the results' file: mean and P99, the paper's Figure 8.

``python -m benchmarks.gpu.serving.figure FOLDER`` draws it again where the run had no matplotlib.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write the PNG.

    Raises:
        ImportError: matplotlib is not installed.
        LookupError: the run has no curves.
    """
    import matplotlib as mpl  # only drawing needs it

    mpl.use("agg")
    import matplotlib.pyplot as plt

    curves = results["parts"]["figure 8"]["found"]["curves"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
    for axis, key, title in zip(
        axes, ("mean_seconds", "p99_seconds"), ("mean", "P99"), strict=True
    ):
        top = _top(curves, key)
        for label, points in curves.items():
            _line(axis, label, points, key, top)
        axis.set(title=f"{title} latency", xlabel="requests a second", ylabel="seconds")
        axis.set_ylim(0, top)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _line(axis: Any, label: str, points: Sequence[Mapping[str, Any]], key: str, top: float) -> None:
    """Points that were measured are marked, hollow where the run was saturated."""
    ordered = sorted(points, key=lambda each: each["rate"])
    steady = [each for each in ordered if not each["is_saturated"]]
    is_measured = len(points) < _MANY
    mark = "o" if is_measured else None
    (line,) = axis.plot(
        [each["rate"] for each in steady], [each[key] for each in steady], marker=mark, label=label
    )
    for each in ordered:
        if each["is_saturated"]:
            y = min(each[key], 0.97 * top)
            axis.plot(each["rate"], y, marker="o", mfc="none", color=line.get_color())


_MANY = 20
"""From so many points on a curve is computed, not measured."""


def _top(curves: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> float:
    """A little above the highest measured point that means something."""
    measured = [
        each[key]
        for points in curves.values()
        for each in points
        if len(points) < _MANY and not each["is_saturated"]
    ]
    everything = [each[key] for points in curves.values() for each in points]
    return 1.25 * float(max(measured or everything))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(json.loads((folder / "results.json").read_text(encoding="utf-8")), folder / "figure-8.png")
