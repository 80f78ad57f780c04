"""What FP8 does to answers: on the golden models, and on the shipped one's questions.

Everything runs on a CPU, where FP8 is a reference of the GPU's rounding. The model in float32 is
what is compared with; bfloat16, which GPUs run anyway, stands beside FP8 for a measure. Twice over:
*forced*, each pass from what float32 has committed (logits, the token that would be proposed), and
*free*, each run by itself to its end. ``make bench-fp8`` runs it and prints a table.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.questions import Question, questions
from sangam_core.errors import SangamError
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.description import ModelConfig
from sangam_worker.plan import Outcome, Plan
from sangam_worker.sampling.rules import committable
from sangam_worker.verify import Case, read_cases, run_cases

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
IN_FLIGHT = 8

_LEGEND = """\
logits: error relative to their spread (root mean square over all rows), and the largest in a logit
tokens: rows in which the same token is the best (forced); answer tokens that are equal (free)
right: questions answered right, decoded freely (float32: in brackets)"""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A number format by the names of ``load_engine``."""

    dtype: str
    quantization: str

    def __str__(self) -> str:
        if self.quantization == "none":
            return self.dtype
        return f"{self.quantization}, {self.dtype} beside"


REFERENCE = Numbers("float32", "none")
COMPARED = (Numbers("bfloat16", "none"), Numbers("float32", "fp8"), Numbers("bfloat16", "fp8"))


@dataclass(slots=True)
class Difference:
    """How far rows of logits are from the reference's, summed up."""

    num_rows: int = 0
    num_equal: int = 0
    squares: float = 0.0
    largest: float = 0.0

    def add(self, wanted: Tensor, got: Tensor, mask_id: int) -> None:
        """Take in rows ``[rows, vocab]``; the mask token is never proposed."""
        wanted, got = wanted.double(), got.double()
        errors, spreads = (got - wanted).abs(), wanted.std(-1, correction=0)
        self.num_rows += len(wanted)
        self.squares += float((errors.square().mean(-1) / spreads.square()).sum())
        self.largest = max(self.largest, float(errors.max()))
        best = [rows.index_fill(-1, torch.tensor(mask_id), -math.inf) for rows in (wanted, got)]
        self.num_equal += int((best[0].argmax(-1) == best[1].argmax(-1)).sum())

    @property
    def relative_error(self) -> float:
        """Root mean square over all rows, each relative to its spread."""
        return math.sqrt(self.squares / self.num_rows)

    @property
    def equal_share(self) -> float:
        """Of rows whose best token is the reference's."""
        return self.num_equal / self.num_rows


class ForcedEngines:
    """Carries out plans as ``reference`` does; the others see the same tokens, on their own KV."""

    def __init__(self, reference: Engine, others: Mapping[Numbers, Engine]) -> None:
        self._reference, self._others = reference, others
        self.differences = {numbers: Difference() for numbers in others}

    @property
    def model_config(self) -> ModelConfig:
        """The reference's."""
        return self._reference.model_config

    @property
    def kv_pool(self) -> KVPool:
        """The reference's."""
        return self._reference.kv_pool

    def execute(self, plan: Plan) -> Outcome:
        """The reference's outcome."""
        family = self.model_config.family
        num_rows = sum(len(committable(item, family)) for item in plan.passes)
        wanted = self._reference.forward(plan)[:num_rows]
        for numbers, engine in self._others.items():
            got = engine.forward(plan)[:num_rows]
            if num_rows:
                self.differences[numbers].add(wanted, got, self.model_config.mask_id)
        return self._reference.execute(plan)


@dataclass(frozen=True, slots=True)
class Line:
    """One model in one number format."""

    model: str
    numbers: str
    relative_error: float
    largest_error: float
    forced_equal: float
    free_equal: float
    num_right: int | None = None
    num_right_in_float32: int | None = None
    num_questions: int | None = None

    def text(self) -> str:
        """A row of the printed table."""
        right = ""
        if self.num_questions is not None:
            right = f"{self.num_right} ({self.num_right_in_float32}) of {self.num_questions}"
        return (
            f"{self.model:16} {self.numbers:22} {self.relative_error:8.2%} "
            f"{self.largest_error:9.3f} {self.forced_equal:9.2%} {self.free_equal:8.2%}  {right}"
        )


_HEADER = (
    f"{'':16} {'':22} {'logits':>8} {'':>9} {'tokens':>9} {'':>8}\n"
    f"{'model':16} {'numbers':22} {'error':>8} {'largest':>9} {'forced':>9} {'free':>8}  right"
)


def compare(
    name: str, model: str, cases: Sequence[Case], asked: Sequence[Question] = ()
) -> list[Line]:
    """A model's lines.

    Args:
        cases: what is decoded. asked: the questions that these cases are, if they are.
    """
    total_pages = IN_FLIGHT * max(case.geometry.num_pages for case in cases)

    def engine(numbers: Numbers) -> Engine:
        return load_engine(
            model,
            dtype=numbers.dtype,
            quantization=numbers.quantization,
            total_pages=total_pages,
        )

    others = {numbers: engine(numbers) for numbers in COMPARED}
    forced = ForcedEngines(engine(REFERENCE), others)
    wanted = _answers(cases, forced)
    lines = []
    for numbers, other in others.items():
        got, difference = _answers(cases, other), forced.differences[numbers]
        pairs = [pair for case in cases for pair in zip(got[case.id], wanted[case.id], strict=True)]
        line = Line(
            model=name,
            numbers=str(numbers),
            relative_error=difference.relative_error,
            largest_error=difference.largest,
            forced_equal=difference.equal_share,
            free_equal=sum(ours == theirs for ours, theirs in pairs) / len(pairs),
            num_right=_num_right(asked, got) if asked else None,
            num_right_in_float32=_num_right(asked, wanted) if asked else None,
            num_questions=len(asked) or None,
        )
        lines.append(line)
        _say(line.text())
    return lines


def _answers(cases: Sequence[Case], engine: Engine | ForcedEngines) -> dict[str, tuple[int, ...]]:
    """Tokens behind each case's prompt, masks included that an end token left."""
    return {
        ran.case.id: ran.output_ids[len(ran.case.prompt_ids) :]
        for ran in run_cases(cases, engine, in_flight=IN_FLIGHT)
    }


def _num_right(asked: Sequence[Question], answers: Mapping[str, Sequence[int]]) -> int:
    return sum(each.is_right(answers[each.case.id]) for each in asked)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, print the table; returns the exit status."""
    given = _parser().parse_args(arguments)
    _say(_HEADER)
    try:
        lines = [line for each in _models(given) for line in compare(*each)]
    except SangamError as error:
        sys.stderr.write(f"fp8_accuracy: {error}\n")
        return 2
    _say(_LEGEND)
    if given.json is not None:
        content = json.dumps([asdict(line) for line in lines], indent=1)
        given.json.write_text(content + "\n", encoding="utf-8")
    return 0


def _models(given: argparse.Namespace) -> list[tuple[str, str, list[Case], Sequence[Question]]]:
    """What is compared: name, model, cases, questions."""
    found: list[tuple[str, str, list[Case], Sequence[Question]]] = []
    for model, group in groupby(read_cases(given.golden), key=lambda case: case.model):
        found.append((model.name, str(model), list(group)[: given.cases], ()))
    if given.questions:
        asked = questions(given.questions)
        found.append(("small (shipped)", "small", [each.case for each in asked], asked))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8_accuracy", description=__doc__)
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder of golden cases")
    parser.add_argument("--cases", type=int, help="of each golden model (default: all)")
    parser.add_argument(
        "--questions", type=int, default=40, help="of each task of the shipped model; 0: none"
    )
    parser.add_argument("--json", type=Path, help="also write every figure there")
    return parser


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
