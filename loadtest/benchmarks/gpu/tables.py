"""The results as markdown: goals first, then what each part found, then what did not run.

Decides what is told of each part. Reads the results' file only, so that a table can be made again
from it: ``python -m benchmarks.gpu.tables FOLDER/results.json``.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import goals_table

_PASS_COLUMNS = {
    "launch": "launch", "prefill_tokens": "prefill", "decode_blocks": "blocks",
    "context_tokens": "context", "total_ms": "ms", "device_ms": "device ms",
    "without_attention_ms": "without attention ms", "host_ms": "issue ms", "wall_ms": "wall ms",
    "floor_ms": "floor ms",
}  # fmt: skip


def tables(results: Mapping[str, Any]) -> str:
    """All of it."""
    parts = results["parts"]
    machine = ", ".join(f"{key}: {value}" for key, value in results["machine"].items())
    head = f"# GPU benchmarks\n\n{machine}.\n\n## Goals\n\n{goals_table(parts)}"
    return f"{head}\n\n{tables_of_parts(parts)}\n"


def tables_of_parts(parts: Mapping[str, Any]) -> str:
    """A section for each part."""
    sections = (f"## {name}\n\n" + "\n\n".join(_of_part(part)) for name, part in parts.items())
    return "\n\n".join(sections)


def _of_part(part: Mapping[str, Any]) -> Iterator[str]:
    found = part["found"]
    if part["status"] != "done":
        left_out = found.get("cut_short")
        why = part.get("error") or "left out: " + ", ".join(map(str, left_out or ()))
        yield f"**{part['status']}**: {why}"
    lines = found.get("lines") or found.get("passes")
    if lines and "floor_ms" in lines[0] and "launch" in lines[0] and "total_ms" in lines[0]:
        yield markdown(
            list(_PASS_COLUMNS.values()), [_cells(each, _PASS_COLUMNS) for each in lines]
        )
    elif lines:
        yield markdown(list(lines[0]), [[_cell(each[key]) for key in lines[0]] for each in lines])
    plain = {key: value for key, value in found.items() if isinstance(value, int | float | str)}
    if plain:
        yield "\n".join(f"* {key}: {_cell(value)}" for key, value in plain.items())


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
    return str(value)


if __name__ == "__main__":
    sys.stdout.write(tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
