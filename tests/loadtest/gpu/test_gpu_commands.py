"""What both commands share: attention that can be had, tables that fail, parts by name."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu.commands import Attends, Found, run_parts
from benchmarks.gpu.engines import Place
from benchmarks.gpu.kernels import OF_MODELS, Commands
from benchmarks.gpu.parts import Budget, Part, Record

NAMES = ("batch_prefill", "batch_prefill_sm90")


def options(out: Path, **changes: object) -> argparse.Namespace:
    given = {
        "out": out, "seconds": 100.0, "device": "cpu", "resume": False, "patience": 1.0,
        "only": [""], "attention": "flashinfer", "operators": "flashinfer",
    }  # fmt: skip
    return argparse.Namespace(**given | changes)


def kernels_of(*, is_fa3_broken: bool) -> Sequence[Commands]:
    fails = [sys.executable, "-c", "raise SystemExit('ptxas died')"]
    works = [sys.executable, "-c", "pass"]
    return [{NAMES[0]: works, NAMES[1]: fails if is_fa3_broken else works}]


def nothing_written(results: Record, folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("attention", "is_fa3_broken", "expected"),
    [
        ("flashinfer", False, "flashinfer"),
        ("flashinfer", True, "flashinfer-fa2-blocks"),
        ("flashinfer-fa3", True, "flashinfer-fa3"),
        ("torch", True, "torch"),
    ],
)
def test_where_fa3_does_not_compile_fa2_attends(
    attention: str, is_fa3_broken: bool, expected: str, tmp_path: Path
) -> None:
    place = Place("cpu", "float32", attention, "flashinfer")

    def parts(found: Found, attends: Attends) -> list[Part]:
        def run(record: Record, budget: Budget) -> None:
            record["attention"] = attends(place).attention

        return [Part("asks", run, OF_MODELS)]

    given = options(tmp_path, attention=attention)
    run = run_parts(
        given, parts, {}, nothing_written, lambda: kernels_of(is_fa3_broken=is_fa3_broken)
    )
    assert run.parts["asks"]["found"] == {"attention": expected}
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert set(results["kernel_errors"]) == ({NAMES[1]} if is_fa3_broken else set())


def test_a_table_that_cannot_be_made_costs_no_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(results: Record, folder: Path) -> None:
        raise KeyError("a column")

    def parts(found: Found, attends: Attends) -> list[Part]:
        return [Part("finds", lambda record, budget: record.update(value=1))]

    given = options(tmp_path, attention="torch", operators="torch")
    run = run_parts(given, parts, {}, fails, list)
    assert run.parts["finds"]["status"] == "done"
    assert capsys.readouterr().err.count("KeyError: 'a column'") == 1
