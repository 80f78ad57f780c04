"""The comparison of FP8's answers with float32's counts what it says it counts."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.fp8_accuracy import COMPARED, REFERENCE, Difference, ForcedEngines, main
from benchmarks.questions import questions
from sangam_worker.engine_loading import load_engine
from sangam_worker.small_model import tokens
from sangam_worker.verify import first_difference, read_cases, run_cases

GOLDEN = Path(__file__).parents[1] / "golden"


def test_errors_are_relative_to_each_rows_spread_and_masks_are_never_proposed() -> None:
    wanted = torch.tensor([[-1.0, 1.0, 9.0], [-10.0, 10.0, 0.0]])
    wanted[0, 2] = 0.0
    got = wanted + torch.tensor([[0.3, 0.3, 0.3], [30.0, 0.0, 90.0]])
    difference = Difference()
    difference.add(wanted, got, mask_id=2)
    spreads = wanted.double().std(-1, correction=0)
    squares = 0.3**2 / spreads[0] ** 2 + (30.0**2 + 90.0**2) / 3 / spreads[1] ** 2
    assert difference.relative_error == pytest.approx(math.sqrt(squares / 2))
    assert difference.largest == pytest.approx(90.0)
    assert difference.equal_share == 0.5


def test_the_reference_leads_and_the_others_follow_without_a_word() -> None:
    cases = [case for case in read_cases(GOLDEN) if case.family == "dream"][:2]
    model = str(cases[0].model)
    engines = {
        numbers: load_engine(
            model, dtype=numbers.dtype, quantization=numbers.quantization, total_pages=64
        )
        for numbers in (REFERENCE, *COMPARED)
    }
    forced = ForcedEngines(load_engine(model, total_pages=64), engines)
    for ran in run_cases(cases, forced, in_flight=2):
        assert first_difference(ran.case, ran.output_ids, ran.forwards) is None
    itself, narrow, fp8, both = forced.differences.values()
    assert (itself.relative_error, itself.largest, itself.equal_share) == (0.0, 0.0, 1.0)
    assert 0 < narrow.relative_error < fp8.relative_error < 0.5
    assert 0.5 < fp8.equal_share < 1
    assert both.num_rows == itself.num_rows > 0


def test_questions_are_those_of_the_shipped_model_and_know_their_answers() -> None:
    asked = questions(1)
    assert len({each.case.id for each in asked}) == len(asked) > 5
    for each in asked:
        answer = tokens.encode_text(each.item.answer)
        assert len(answer) < each.case.geometry.mask_buffer_tokens
        assert each.is_right([*answer, tokens.EOS, tokens.MASK])
        assert not each.is_right([*answer, answer[0], tokens.EOS])


def test_the_command_prints_a_line_for_each_model_and_number_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fp8.json"
    assert main(["--cases", "1", "--questions", "1", "--json", str(out)]) == 0
    lines = json.loads(out.read_text())
    assert [line["model"] for line in lines[::3]] == [
        "dream-tiny-a", "llada-tiny-a", "small (shipped)",
    ]  # fmt: skip
    for line in lines:
        assert 0 < line["relative_error"] < 1
        assert 0 <= line["free_equal"] <= 1
        assert (line["num_questions"] is None) == (line["model"] != "small (shipped)")
    printed = capsys.readouterr().out
    assert printed.count("fp8, bfloat16 beside") == 3


def test_a_folder_without_cases_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--golden", str(tmp_path)]) == 2
    assert "fp8_accuracy: " in capsys.readouterr().err
