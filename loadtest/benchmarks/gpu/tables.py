"""The results as markdown: goals first, then what each part found, then what did not run.

Decides what is told of each part. Reads the results' file only, so that a table can be made again
from it: ``python -m benchmarks.gpu.tables FOLDER/results.json``.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.ceilings import assumed_ceilings
from benchmarks.gpu.goals import goals_table, readme_rows

_PASS_COLUMNS = {
    "launch": "launch", "prefill_tokens": "prefill", "decode_blocks": "blocks",
    "context_tokens": "context", "total_ms": "ms", "device_ms": "device ms",
    "without_attention_ms": "without attention ms", "host_ms": "issue ms", "wall_ms": "wall ms",
    "floor_ms": "floor ms",
}  # fmt: skip


def tables(results: Mapping[str, Any]) -> str:
    """All of it."""
    parts = results["parts"]
    sections = [
        f"# GPU benchmarks\n\n{machine(results)}",
        f"## Goals\n\n{goals_table(parts)}{_assumed(parts)}",
        "## README\n\n| one H200, bf16 | floor | mark | goal | measured |\n|---|--:|--:|--:|---|\n"
        + readme_rows(parts),
        timeline(parts),
        tables_of_parts(parts),
    ]
    return "\n\n".join(sections) + "\n"


def timeline(parts: Mapping[str, Any]) -> str:
    """The parts in the order in which they ran, how each ended and how long it took."""
    rows = [
        [name, part["status"], _cell(part.get("seconds")), _cell(part.get("device"))]
        for name, part in parts.items()
    ]
    head = ["part", "", "seconds", "device behind it"]
    return f"## Parts\n\n{markdown(head, rows)}"


def machine(results: Mapping[str, Any]) -> str:
    """What ran it, for how long, and when FlashInfer's kernels were there."""
    told = "".join(f"* {key}: {value}\n" for key, value in results["machine"].items())
    told += f"* seconds: {results.get('used_seconds')}\n"
    for name, seconds in results.get("kernel_seconds", {}).items():
        told += f"* kernel there after {seconds} s: {name}\n"
    for name, error in results.get("kernel_errors", {}).items():
        told += f"* **kernel failed**: {name}: {' '.join(error.split())[-300:]}\n"
    return told


def _assumed(parts: Mapping[str, Any]) -> str:
    names = assumed_ceilings(parts.get("ceilings", {}).get("found", {}))
    return f"\n\nAssumed, an H200's by the cost model's table: {', '.join(names)}." if names else ""


def tables_of_parts(parts: Mapping[str, Any]) -> str:
    """A section for each part."""
    sections = (f"## {name}\n\n" + "\n\n".join(_of_part(part)) for name, part in parts.items())
    return "\n\n".join(sections)


def _of_part(part: Mapping[str, Any]) -> Iterator[str]:
    found = part["found"]
    if part["status"] != "done":
        yield f"**{part['status']}**: {_why(part)}"
    lines = found.get("lines") or found.get("passes")
    if lines and "floor_ms" in lines[0] and "launch" in lines[0] and "total_ms" in lines[0]:
        yield markdown(
            list(_PASS_COLUMNS.values()), [_cells(each, _PASS_COLUMNS) for each in lines]
        )
    elif lines:
        columns = {key: key for line in lines for key in line}
        yield markdown(list(columns), [_cells(each, columns) for each in lines])
    plain = {key: value for key, value in found.items() if isinstance(value, int | float | str)}
    if plain:
        yield "\n".join(f"* {key}: {_cell(value)}" for key, value in plain.items())
    for title in ("failures", "skipped", "errors"):
        if told := found.get(title):
            yield f"{title}:\n\n" + "\n".join(f"* {key}: {_cell(told[key])}" for key in told)


def _why(part: Mapping[str, Any]) -> str:
    left_out = ", ".join(map(str, part["found"].get("cut_short") or ()))
    if part["status"] == "running":
        return "when this was written"
    return part.get("error") or f"left out: {left_out}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "|" + "--:|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _cells(line: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    return [_cell(line.get(key)) for key in columns]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    return " ".join(str(value).split()).replace("|", "/")


if __name__ == "__main__":
    sys.stdout.write(tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
