"""Answer tokens a second: the engine at 1 and at 8 concurrent requests, against a plain loop.

The plain loop is ``baselines.fast_dllm`` at batch 1, with the same weights. Everything runs in this
process, in alternating rounds, without HTTP; scheduler, paging and packing are the worker's own.
Prints a table, and with ``--json`` writes every measurement. ``make bench-engine`` runs it.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from baselines.llada_dense import DenseLlada
from benchmarks.contenders import Answers, dense_model, plain_loop, through_engine
from benchmarks.rounds import Measurement, Round, Summary, run_rounds, summarise
from benchmarks.workloads import BLOCK_LENGTH, Workload, workloads
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine

REFERENCE = "plain loop"

_LEGEND = """\
tokens/s: answer tokens a second, one torch thread, median over the rounds
ratio: to the plain loop, within a round, median (lowest to highest); cpu: the same by CPU time
batch: passes that ran together, on average; same: answers equal to the plain loop's"""


def main() -> None:
    """Read the command line, run the workloads, print and write what was seen."""
    given = _arguments()
    torch.set_num_threads(1)  # the engine has no more on a CPU, for the sake of "same bytes"
    chosen = [w for w in workloads(given.concurrency) if given.only in w.name]
    if not chosen:
        sys.exit(
            f"--only {given.only}: no such workload; there are "
            + ", ".join(repr(w.name) for w in workloads(given.concurrency))
        )
    whole = sum(workload.share for workload in chosen)
    total_pages = max(_num_pages(workload, given.concurrency) for workload in chosen)
    results = []
    for workload in chosen:
        _say(f"{workload.name} ({workload.model})")
        engine, dense = _both(workload.model, total_pages)
        budget = given.max_seconds * workload.share / whole
        results.append(_run(workload, engine, dense, given, budget))
    sys.stdout.write(_table(results) + "\n")
    if given.json is not None:
        content = {"machine": _machine(), "workloads": results}
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (8)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each workload, at most")
    parser.add_argument("--max-seconds", type=float, default=240.0, help="time for the rounds")
    parser.add_argument("--only", default="", help="workloads whose name holds this text")
    parser.add_argument("--json", type=Path, default=None, help="file for every measurement")
    return parser.parse_args()


@lru_cache(maxsize=1)
def _both(model: str, total_pages: int) -> tuple[Engine, DenseLlada]:
    """The two sides with the same weights; workloads of a model follow each other."""
    return load_engine(model, total_pages=total_pages), dense_model(model)


def _run(
    workload: Workload,
    engine: Engine,
    dense: DenseLlada,
    given: argparse.Namespace,
    budget_seconds: float,
) -> dict[str, Any]:
    """Measure one workload's contenders."""
    concurrency = given.concurrency
    alone, everyone = workload.prompts[: workload.num_alone], workload.prompts
    answers: dict[str, Answers] = {}

    def contender(
        name: str, prompts: Sequence[Sequence[int]], num_in_flight: int
    ) -> Callable[[], Measurement]:
        def measure() -> Measurement:
            if name == REFERENCE:
                measured, answers[name] = plain_loop(dense, workload, prompts)
            else:
                measured, answers[name] = through_engine(engine, workload, prompts, num_in_flight)
            return measured

        return measure

    contenders = {
        REFERENCE: contender(REFERENCE, alone, 1),
        "engine, 1": contender("engine, 1", alone, 1),
        f"engine, {concurrency}": contender(f"engine, {concurrency}", everyone, concurrency),
    }
    plain_loop(dense, workload, alone[:1])  # warm up: page in the weights, settle allocators
    through_engine(engine, workload, alone[:1], 1)

    def report(index: int, name: str, seen: Measurement) -> None:
        _say(
            f"  round {index + 1}  {name:12} {seen.tokens_per_second:8.1f} tokens/s"
            f"  {seen.num_tokens:5} tokens  {seen.num_passes:4} passes"
            f"  {seen.wall_seconds:6.2f} s (cpu {seen.cpu_seconds:.2f})"
        )

    rounds = run_rounds(contenders, given.rounds, budget_seconds, report)
    same = {name: _num_same(answers[REFERENCE], found) for name, found in answers.items()}
    return _result(workload, rounds, summarise(rounds, REFERENCE), same)


def _say(line: str) -> None:
    """Progress, at once."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _num_same(reference: Answers, found: Answers) -> str:
    """How many answers are the plain loop's, of those that both gave."""
    pairs = list(zip(reference, found, strict=False))
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def _num_pages(workload: Workload, concurrency: int) -> int:
    longest = max(map(len, workload.prompts)) + workload.num_blocks * BLOCK_LENGTH
    return concurrency * -(-longest // 16)


def _result(
    workload: Workload, rounds: Sequence[Round], summaries: Sequence[Summary], same: dict[str, str]
) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "model": workload.model,
        "num_prompts": len(workload.prompts),
        "num_prompts_alone": workload.num_alone,
        "mask_buffer_tokens": workload.num_blocks * BLOCK_LENGTH,
        "decoding": workload.decoding.model_dump(mode="json"),
        "answers_like_the_plain_loop": same,
        "summaries": [asdict(item) for item in summaries],
        "rounds": [{name: asdict(item) for name, item in seen.items()} for seen in rounds],
    }


def _table(results: Sequence[dict[str, Any]]) -> str:
    """Plain text, the same on a terminal, in a log and in a README."""
    head = ("workload", "contender", "tokens/s", "ratio", "(range)", "cpu", "tok/pass", "batch",
            "rounds", "same")  # fmt: skip
    rows = [head, *(_row(result, item) for result in results for item in result["summaries"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", _LEGEND])


def _row(result: dict[str, Any], item: dict[str, Any]) -> tuple[str, ...]:
    return (
        result["workload"] if item["name"] == REFERENCE else "",
        item["name"],
        f"{item['tokens_per_second']:.1f}",
        f"{item['ratio']:.2f}",
        f"({item['lowest_ratio']:.2f}-{item['highest_ratio']:.2f})",
        f"{item['cpu_ratio']:.2f}",
        f"{item['tokens_per_pass']:.2f}",
        f"{item['passes_per_iteration']:.1f}",
        str(len(result["rounds"])),
        result["answers_like_the_plain_loop"][item["name"]],
    )


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }


def _processor() -> str:
    """The processor's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    main()
