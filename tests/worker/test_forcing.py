"""Teacher forcing: the command, which differences are excused, and how errors are expected."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.checkpoints import GOLDEN, LLADA, an_engine
from tests.worker.requests import a_decoding, a_pass, a_plan
from torch import Tensor

from sangam_core.decoding import UnmaskingRule
from sangam_worker.engine import Engine
from sangam_worker.plan import Outcome, Pass, Plan
from sangam_worker.verify.__main__ import main
from sangam_worker.verify.decisions import Limits, is_choice_explained, limits_of
from sangam_worker.verify.forcing import ForcedEngine
from sangam_worker.verify.reference import Reference
from sangam_worker.verify.report import tally_lines
from sangam_worker.verify.rounding import Errors, NumberFormat, number_format

# The command


def a_folder(at: Path, family: str, change: Callable[[Any], None] | None = None) -> Path:
    """The three cases of a family with the fewest passes."""
    name = f"{family}-tiny-a"
    shutil.copytree(GOLDEN / "models" / name, at / "models" / name)
    raw = json.loads((GOLDEN / f"{family}_cases.json").read_text())
    raw = sorted(raw, key=lambda case: case["nfe"])[:3]
    if change is not None:
        change(raw)
    (at / f"{family}_cases.json").write_text(json.dumps(raw))
    return at


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_float32_on_a_cpu_has_nothing_to_excuse(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(a_folder(tmp_path, family)), "--teacher-forcing"]) == 0
    said = capsys.readouterr().out
    assert said.count("equal (100.00 %)\n") == 2
    assert "confidences  differ by 0 at most" in said
    assert "off by 0 % of their spread\n" in said
    assert said.endswith("0 differences that float32 on cpu with torch does not explain\n")


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_bfloat16_differs_by_no_more_than_its_roundings_explain(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--teacher-forcing", "--dtype", "bfloat16", "--in-flight", "2"]
    assert main([str(a_folder(tmp_path, family)), *options]) == 0
    said = capsys.readouterr().out
    assert f"{family}-tiny-a: 3 cases" in said
    assert "times what is to be expected" in said
    assert "off by 0 %" not in said


def test_a_reference_that_is_not_golden_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(raw: Any) -> None:
        raw[0]["forwards"][0]["writes"][0][1] += 1

    assert main([str(a_folder(tmp_path, "llada", change)), "--teacher-forcing"]) == 1
    said = capsys.readouterr().out
    assert "the float32 reference itself is not golden: pass 0: position" in said
    assert "1 differences that" in said


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--attention", "flush"], "attention 'flush' is unknown"),
        (["--attention", "flashinfer"], "FlashInfer needs a CUDA device"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--quantization", "fp4"], "quantization 'fp4' is unknown"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--graph-block", "8"], "CUDA graphs need a CUDA device"),
    ],
)
def test_an_engine_that_cannot_be_made_is_one_clear_line(
    options: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(a_folder(tmp_path, "llada")), "--teacher-forcing", *options]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_what_is_compared_cannot_be_moved_between_engines() -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(GOLDEN), "--teacher-forcing", "--split"])
    assert stop.value.code == 2


# What an engine is told apart by


@dataclass
class Altered:
    """An engine, with another outcome."""

    engine: Engine
    alter: Callable[[Outcome, int], Outcome]
    num_calls: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def execute(self, plan: Plan) -> Outcome:
        self.num_calls += 1
        return self.alter(self.engine.execute(plan), self.num_calls)


def altered(outcome: Outcome, **changes: Any) -> Outcome:
    """The first commit changed in every pass."""
    passes = tuple(
        type(item)(
            key=item.key,
            commits=(item.commits[0].model_copy(update=changes), *item.commits[1:]),
            carry=item.carry,
        )
        for item in outcome.passes
    )
    return type(outcome)(outcome.iteration, passes)


def without_first(outcome: Outcome) -> Outcome:
    passes = tuple(type(item)(key=item.key, commits=item.commits[1:]) for item in outcome.passes)
    return type(outcome)(outcome.iteration, passes)


def disagreements(alter: Callable[[Outcome, int], Outcome]) -> list[str]:
    """Of one pass in float32, where nothing may differ. Call 1 commits everything."""
    reference = Reference(LLADA, NumberFormat(), total_pages=8)
    engine: Any = Altered(an_engine(LLADA, total_pages=8), alter)
    forced = ForcedEngine(reference, engine)
    decoding = a_decoding(threshold=0.2)
    item = a_pass(list(range(40)), pages=(2, 0, 1), masked=range(20, 28), decoding=decoding)
    forced.execute(a_plan(item))
    return forced.tally.disagreements


def test_the_same_engine_has_no_disagreement() -> None:
    assert disagreements(lambda outcome, call: outcome) == []


@pytest.mark.parametrize(
    ("alter", "complaint"),
    [
        (lambda outcome, call: altered(outcome, token=1), "token 1 for "),
        (lambda outcome, call: altered(outcome, confidence=0.5), "confidence 0.5 for "),
        (
            lambda outcome, call: without_first(outcome) if call == 2 else outcome,
            "does not commit position",
        ),
        (
            lambda outcome, call: altered(outcome, token=1) if call == 2 else outcome,
            "run again, the same pass gives other tokens",
        ),
    ],
)
def test_another_outcome_is_a_disagreement(
    alter: Callable[[Outcome, int], Outcome], complaint: str
) -> None:
    assert any(complaint in line for line in disagreements(alter))


def test_logits_that_are_not_numbers_are_a_disagreement() -> None:
    reference = Reference(LLADA, number_format(dtype="bfloat16"), total_pages=8)
    engine = an_engine(LLADA, total_pages=8, dtype="bfloat16")  # its pages are NaN
    forced = ForcedEngine(reference, engine)
    item = a_pass([5] * 40, rows=range(8, 16), pages=(2, 0, 1), masked=range(8, 16))
    forced.execute(a_plan(item))
    assert "logits that are not numbers" in forced.tally.disagreements[0]
    assert "not numbers" in next(tally_lines("a", forced.tally))


# Which decisions are excused


def a_choice(rule: UnmaskingRule, num: int, **changes: Any) -> Pass:
    block = range(num)
    decoding = a_decoding(rule, **changes)
    return a_pass([1] * num, masked=block, block=block, pages=(0,), decoding=decoding)


def limits(num: int, each: float) -> Limits:
    return Limits((0.0,) * num, (each,) * num, 0.0)


CHOICES: dict[str, tuple[Pass, list[float], int, float]] = {
    # a pass, golden confidences, the candidate decided otherwise, and what would flip it
    "above the threshold": (
        a_choice(UnmaskingRule.THRESHOLD, 3, threshold=0.9), [0.99, 0.92, 0.3], 1, 0.02,
    ),
    "below the threshold": (
        a_choice(UnmaskingRule.THRESHOLD, 3, threshold=0.9), [0.99, 0.85, 0.3], 1, 0.05,
    ),
    "the best, below the threshold": (
        a_choice(UnmaskingRule.THRESHOLD, 3, threshold=0.9), [0.5, 0.44, 0.3], 0, 0.03,
    ),
    "the worst of the chosen": (
        a_choice(UnmaskingRule.FIXED, 6, steps=3), [0.5, 0.44, 0.4, 0.1, 0.05, 0.01], 1, 0.02,
    ),
    "the best of the rejected": (
        a_choice(UnmaskingRule.FIXED, 6, steps=3), [0.5, 0.44, 0.4, 0.1, 0.05, 0.01], 2, 0.02,
    ),
    "a link of the factor's chain": (
        # Rank 2 needs 2/3, rank 3 needs 3/4, rank 4 needs 4/5.
        a_choice(UnmaskingRule.FACTOR, 5, factor=1.0), [0.99, 0.96, 0.79, 0.2, 0.1], 2, 0.04,
    ),
    "behind a broken chain": (
        a_choice(UnmaskingRule.FACTOR, 5, factor=1.0), [0.99, 0.63, 0.55, 0.2, 0.1], 1, 0.0367,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_excused_if_the_golden_run_decided_by_less_than_the_limit(name: str) -> None:
    item, confidences, index, margin = CHOICES[name]
    for share, is_excused in ((0.9, False), (1.1, True)):
        allowed = limits(len(confidences), share * margin)
        assert is_choice_explained(item, "llada", confidences, allowed, index) is is_excused


def test_dream_s_rounded_threshold_counts_against_a_decision() -> None:
    item = a_choice(UnmaskingRule.CONFIDENCE_THRESHOLD, 3, threshold=0.9)
    rows = torch.zeros(3, 10, dtype=torch.float64)
    found = limits_of(item, "dream", rows, torch.full((3,), 1e-9), 9, torch.bfloat16)
    assert found.thresholds == pytest.approx(0.9 - 0.8984375)
    assert limits_of(item, "llada", rows, torch.full((3,), 1e-9), 9, torch.bfloat16).thresholds == 0


def test_where_nothing_may_differ_every_limit_is_zero() -> None:
    item = a_choice(UnmaskingRule.THRESHOLD, 2)
    found = limits_of(item, "llada", torch.randn(2, 9).double(), torch.zeros(2), 8, torch.float32)
    assert found == Limits((0.0, 0.0), (0.0, 0.0), 0.0)


@pytest.mark.parametrize(
    "rule", [UnmaskingRule.MASKGIT_PLUS, UnmaskingRule.TOPK_MARGIN, UnmaskingRule.ENTROPY]
)
def test_confidences_of_perturbed_logits_stay_within_their_limits(rule: UnmaskingRule) -> None:
    """And not far within: some come near."""
    torch.manual_seed(0)
    rows = 4 * torch.randn(400, 50).double()
    moved = rows + 0.05 * torch.randn(400, 50).double()
    item = a_choice(rule, 400, steps=3)
    found = limits_of(item, "dream", rows, torch.full((400,), 0.05), 49, torch.float32)
    differences = (measured(moved, rule) - measured(rows, rule)).abs()
    shares = differences / torch.tensor(found.confidences).double()
    assert shares.max() <= 1
    assert shares.max() > 0.1


def measured(rows: Tensor, rule: UnmaskingRule) -> Tensor:
    probabilities = rows.softmax(-1)
    if rule is UnmaskingRule.ENTROPY:
        return (probabilities * probabilities.log()).sum(-1)
    best, second = probabilities[:, :49].topk(2, -1).values.unbind(-1)
    return best - second if rule is UnmaskingRule.TOPK_MARGIN else best


# What errors are expected


def test_only_plain_float32_on_a_cpu_has_to_be_exact() -> None:
    assert number_format(dtype="float32").is_exact
    for changes in ({"device": "cuda"}, {"attention": "flashinfer"}, {"quantization": "fp8"}):
        assert not number_format(dtype="float32", **changes).is_exact
    assert not number_format(dtype="bfloat16").is_exact


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bfloat16, number_format(dtype="bfloat16").rounding),
        (
            torch.float8_e4m3fn,
            number_format(dtype="bfloat16", quantization="fp8").product_rounding,
        ),
    ],
)
def test_a_rounding_is_as_large_as_the_format_s(dtype: torch.dtype, size: float) -> None:
    """Of numbers whose logarithms are uniform, within what e4m3 has at full precision."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200_000, generator=generator, dtype=torch.float64).mul(8 * math.log(2)).exp()
    error = x.to(dtype).double() / x - 1
    assert error.square().mean().sqrt() == pytest.approx(size, rel=0.03)


def test_errors_have_the_size_that_they_are_said_to_have() -> None:
    kind = NumberFormat(rounding=0.001, product_rounding=0.02, summation=1e-5)
    errors, ones = Errors(kind, seed=1), torch.ones(400, 400)

    def size(x: Tensor) -> float:
        return float((x - 1).square().mean().sqrt())

    assert size(errors.rounded(ones, 4)) == pytest.approx(0.002, rel=0.03)
    assert size(errors.of_input(ones)) == pytest.approx(math.hypot(0.02, 0.001 * 2**0.5), rel=0.03)
    in_all = math.sqrt(0.02**2 + 2 * 0.001**2 + 100 * 1e-10)
    assert size(errors.of_product(ones, num_terms=100)) == pytest.approx(in_all, rel=0.03)
    of_head = math.sqrt(2 * 0.001**2 + 100 * 1e-10)
    assert size(errors.of_head(ones, num_terms=100)) == pytest.approx(of_head, rel=0.03)
