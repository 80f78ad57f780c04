"""What a worker's iterations cost on this machine, as a CSV that cost models are fitted from.

Decides which iterations are measured (a grid of prefill tokens, decode blocks, keys and masks,
mixed ones included), how often, and the columns; ``iterations`` runs them. Measurements go round
the grid, forwards and backwards in turn, so that a slow minute of the machine hits all points, and
medians are taken. ``make bench-passes`` runs it.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import TextIO

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.iterations import BLOCK_LENGTH, Iteration, IterationBench, NotMeasured, Timing
from benchmarks.progress_lines import ProgressLines
from sangam_core.errors import ConfigurationError
from sangam_worker.models.random_models import RANDOM_PREFIX

COLUMNS = (
    "model", "engine", "launch", "prefill_tokens", "decode_blocks", "context_tokens",
    "total_ms", "without_attention_ms", "host_ms",
    "rows_masked", "scheduler_ms", "cpu_ms", "repeats", "dtype", "device",
)  # fmt: skip
"""The first nine are those of measured GPU profiles; ``host_ms`` is the time to issue a pass, empty
where the host computes it itself. ``rows_masked``: rows with the LM head. ``cpu_ms``: CPU time of
the thread. The host's part outside the engine is ``scheduler_ms``, within ``total_ms``."""

MOST_MASKS = BLOCK_LENGTH - 1
"""A block has one more before it is measured."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Iterations to measure: each value of one axis with each of the others.

    Attributes:
        prefill_tokens: of the prefill, one an iteration. decode_blocks: running beside it.
        context_tokens: keys of a decode. masks: masked positions of a decode.
    """

    prefill_tokens: Sequence[int]
    decode_blocks: Sequence[int]
    context_tokens: Sequence[int]
    masks: Sequence[int]

    def iterations(self) -> list[Iteration]:
        """Prefills alone, decodes alone, and each prefill beside each set of decodes."""
        decodes = list(product(self.decode_blocks, self.context_tokens, self.masks))
        alone = [Iteration(tokens, 0, tokens, BLOCK_LENGTH) for tokens in self.prefill_tokens]
        together = [
            Iteration(tokens, *decode) for decode in decodes for tokens in (0, *self.prefill_tokens)
        ]
        return alone + together


@dataclass(frozen=True, slots=True)
class Sample:
    """One iteration measured twice in a row: whole, and with the attention left out."""

    whole: Timing
    without_attention: Timing


Samples = dict[Iteration, list[Sample]]
"""By iteration, in the order of the grid."""


def measure_all(
    iterations: Sequence[Iteration],
    measure: Callable[[Iteration], Sample],
    num_repeats: int,
    budget_seconds: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
    on_round: Callable[[Samples], None] = lambda samples: None,
) -> Samples:
    """Measure every iteration ``num_repeats`` times, round by round, after an uncounted round.

    Ends early when another round like the longest one would go beyond the budget, but never
    before one counted round is complete.

    Args:
        progress: told after each measurement how many are done, and how many there will be as far
            as the rounds so far tell; they are equal after the last one only.
        on_round: given all counted samples after each round but the first.
    """
    samples: Samples = {item: [] for item in iterations}
    started, longest_seconds = clock(), 1e-9  # a clock may stand still
    number, num_rounds, num_done = 0, 1 + num_repeats, 0
    while number < num_rounds:
        round_started = clock()
        for item in iterations if number % 2 else reversed(iterations):
            sample = measure(item)
            if number:
                samples[item].append(sample)
            num_done += 1
            if num_done % len(iterations):
                progress(num_done, num_rounds * len(iterations))
        now = clock()
        number += 1
        longest_seconds = max(longest_seconds, now - round_started)
        left_seconds = started + budget_seconds - now
        num_affordable = number + max(0, int(left_seconds / longest_seconds))
        num_rounds = min(1 + num_repeats, max(2, num_affordable))
        progress(num_done, num_rounds * len(iterations))
        if number > 1:
            on_round(samples)
    return samples


def row_of(iteration: Iteration, samples: Sequence[Sample]) -> dict[str, str]:
    """The measured columns of one line: medians, in milliseconds."""

    def told(value_of: Callable[[Sample], float | None]) -> str:
        values = [value for sample in samples if (value := value_of(sample)) is not None]
        return f"{median(values) * 1000:.4f}" if values else ""

    return {
        "prefill_tokens": str(iteration.prefill_tokens),
        "decode_blocks": str(iteration.decode_blocks),
        "context_tokens": str(iteration.context_tokens),
        "total_ms": told(lambda sample: sample.whole.total_seconds),
        "without_attention_ms": told(lambda sample: sample.without_attention.total_seconds),
        "host_ms": told(lambda sample: sample.whole.issue_seconds),
        "rows_masked": str(samples[0].whole.rows_masked),
        "scheduler_ms": told(lambda sample: sample.whole.scheduler_seconds),
        "cpu_ms": told(lambda sample: sample.whole.cpu_seconds),
        "repeats": str(len(samples)),
    }


def write_csv(file: TextIO, samples: Samples, names: dict[str, str]) -> None:
    """Write one line an iteration; ``names`` are the columns that are alike in all."""
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for iteration, own in samples.items():
        writer.writerow(names | row_of(iteration, own))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, write the CSV; a file after each round, with medians so far.

    Exits with one line that names the option where the options cannot be used.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the engine has no more on a CPU, for the sake of "same bytes"
    grid = Grid(given.prefill_tokens, given.decode_blocks, given.context_tokens, given.masks)
    iterations = grid.iterations()
    if not iterations:
        parser.error("nothing to measure: give --prefill-tokens or --decode-blocks")
    try:
        if given.out is not None:
            given.out.touch()  # complains now rather than after minutes of measuring
    except OSError as error:
        parser.error(f"argument --out: {given.out}: {error.strerror}")
    try:
        bench = IterationBench(
            given.model,
            dtype=given.dtype,
            device=given.device,
            attention=given.attention,
            total_pages=max(item.num_pages for item in iterations),
        )
        _require_lengths(grid, bench.engine.model_config.max_sequence_tokens)
        samples = _measured(bench, iterations, given)
    except (ConfigurationError, NotMeasured) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, "interrupted\n")
    if given.out is None:
        write_csv(sys.stdout, samples, _names(given))


def _names(given: argparse.Namespace) -> dict[str, str]:
    return {
        "model": given.model.removeprefix(RANDOM_PREFIX),
        "engine": f"sangam-{given.attention}",
        "launch": "eager",
        "dtype": given.dtype,
        "device": given.device,
    }


def _measured(
    bench: IterationBench, iterations: Sequence[Iteration], given: argparse.Namespace
) -> Samples:
    def measure(item: Iteration) -> Sample:
        return Sample(bench.measure(item), bench.measure(item, is_attention_left_out=True))

    def keep(samples: Samples) -> None:
        if given.out is not None:
            with given.out.open("w", encoding="utf-8") as file:
                write_csv(file, samples, _names(given))

    with _progress_shown(len(iterations) * (1 + given.repeats)) as progress:
        return measure_all(
            iterations, measure, given.repeats, given.max_seconds, progress, on_round=keep
        )


@contextmanager
def _progress_shown(num_total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, else a line now and then; on standard error, beside a CSV."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = ProgressLines("iterations measured")
        lines(0, num_total)
        yield lines
        return
    with Progress(console=console) as bar:
        task = bar.add_task("iterations", total=num_total)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _require_lengths(grid: Grid, max_tokens: int) -> None:
    for option, values in (
        ("--prefill-tokens", grid.prefill_tokens),
        ("--context-tokens", grid.context_tokens),
    ):
        if max(values, default=0) > max_tokens:
            raise ConfigurationError(
                f"{option} {max(values)}: the model takes at most {max_tokens} tokens"
            )


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="pass_costs", description=summary)
    parser.add_argument("--model", default="small", help="folder, 'small' or random:NAME (small)")
    parser.add_argument("--device", default="cpu", help="torch device (cpu)")
    parser.add_argument("--dtype", default="float32", help="of weights and KV (float32)")
    parser.add_argument("--attention", default="torch", help="attention backend (torch)")
    lengths, counts = _whole_from(BLOCK_LENGTH), _whole_from(1)
    parser.add_argument(
        "--prefill-tokens", type=lengths, nargs="*", default=[64, 128, 256, 512, 1024],
        metavar="TOKENS", help="rows of the prefill, prompt and masks (64 to 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--decode-blocks", type=counts, nargs="*", default=[1, 2, 4, 8, 16],
        metavar="BLOCKS", help="blocks that decode together (1 to 16)",
    )  # fmt: skip
    parser.add_argument(
        "--context-tokens", type=lengths, nargs="+", default=[64, 256, 1024],
        metavar="TOKENS", help="keys of a decode (64, 256, 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--masks", type=_whole_from(1, MOST_MASKS), nargs="+", default=[4, 24],
        help=f"masks left in a decode block, at most {MOST_MASKS} (4, 24)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=counts, default=7, help="medians are of so many (7)")
    parser.add_argument("--max-seconds", type=counts, default=120, help="time for all (120)")
    parser.add_argument(
        "--out",
        type=Path,
        help="the CSV, there after each round; standard output at the end by default",
    )
    return parser


def _whole_from(least: int, most: int | None = None) -> Callable[[str], int]:
    """An option's type: whole numbers in a range, complained about by argparse with its name."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least or (most is not None and value > most):
            limit = f"at least {least}" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"{value} must be {limit}")
        return value

    return whole


if __name__ == "__main__":
    main()
