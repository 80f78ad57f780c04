"""Measured passes are read as the batches that they are; complaints name file, line and column."""

from pathlib import Path

import pytest
from tests.loadtest.costs.measured import a_batch

from sangam_loadtest.costs.measurements import (
    FP8_ENGINE,
    MeasurementError,
    read_fp8_passes,
    read_passes,
    read_products,
)

HEADER = (
    "model,engine,launch,prefill_tokens,decode_blocks,context_tokens,"
    "total_ms,without_attention_ms,host_ms"
)
LINE = "llada-8b,fused-fa3,eager,2048,16,1024,70.75,60.4,10.1"


def a_file(folder: Path, *lines: str) -> Path:
    path = folder / "passes.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_profile_line_is_a_batch_with_the_head_on_32_rows_a_sequence(tmp_path: Path) -> None:
    (row,) = read_passes(a_file(tmp_path, HEADER, LINE))
    assert row.batch == a_batch(2048, 16, 1024)
    assert row.batch.head_rows == 17 * 32
    assert (row.total, row.without_attention, row.host) == pytest.approx((0.07075, 0.0604, 0.0101))
    assert (row.backend, row.is_worker) == ("fa3", False)


def test_a_workers_line_says_how_many_rows_the_head_ran_on(tmp_path: Path) -> None:
    header, line = HEADER + ",rows_masked,more", LINE + ",96,x"
    (row,) = read_passes(a_file(tmp_path, header, line))
    assert row.is_worker
    assert row.batch.head_rows == 96


def test_empty_times_are_times_not_measured(tmp_path: Path) -> None:
    (row,) = read_passes(a_file(tmp_path, HEADER, "small,x-torch,eager,64,0,64,3.2,,"))
    assert row.without_attention is None
    assert row.host is None


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        (2, "lazy", "launch must be eager or graph, not 'lazy'"),
        (3, "-1", "prefill_tokens must be a whole number >= 0, not '-1'"),
        (3, "1.5", "prefill_tokens must be a whole number >= 0, not '1.5'"),
        (5, "0", "context_tokens must be a whole number >= 1, not '0'"),
        (6, "fast", "total_ms must be milliseconds above 0, not 'fast'"),
        (6, "nan", "total_ms must be milliseconds above 0, not 'nan'"),
        (7, "-2", "without_attention_ms must be milliseconds above 0, not '-2'"),
        (0, "", "model is empty"),
    ],
)
def test_a_bad_value_is_refused_with_file_line_and_column(
    tmp_path: Path, column: int, value: str, told: str
) -> None:
    values = LINE.split(",")
    values[column] = value
    path = a_file(tmp_path, HEADER, LINE, ",".join(values))
    with pytest.raises(MeasurementError) as raised:
        read_passes(path)
    assert str(raised.value) == f"{path}, line 3: {told}"


def test_a_pass_of_nothing_is_refused(tmp_path: Path) -> None:
    line = LINE.replace("2048,16", "0,0")
    with pytest.raises(MeasurementError, match="line 2: decode_blocks and prefill_tokens must not"):
        read_passes(a_file(tmp_path, HEADER, line))


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    path = a_file(tmp_path, HEADER.replace("total_ms", "time"), LINE)
    with pytest.raises(MeasurementError, match="total_ms is no column; there are: model, engine"):
        read_passes(path)


def test_a_line_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="line 2: 2 values where the header names 9"):
        read_passes(a_file(tmp_path, HEADER, "llada-8b,fused-fa3"))


def test_an_empty_file_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="holds no measurements"):
        read_passes(a_file(tmp_path, HEADER))
    with pytest.raises(MeasurementError, match=r"gone.csv: No such file"):
        read_passes(tmp_path / "gone.csv")


def test_a_line_of_both_products_gives_a_pass_of_each(tmp_path: Path) -> None:
    header = "model,launch,prefill_tokens,decode_blocks,context_tokens,bf16_ms,fp8_ms"
    path = a_file(tmp_path, header, "dream-7b,graph,0,8,1024,8.0,6.6")
    plain, quantized = read_fp8_passes(path)
    assert (plain.quantization, plain.total) == ("bf16", 0.008)
    assert (quantized.quantization, quantized.total) == ("fp8", 0.0066)
    assert plain.engine == quantized.engine == FP8_ENGINE


def test_products_may_lack_the_columns_that_were_not_measured(tmp_path: Path) -> None:
    (row,) = read_products(a_file(tmp_path, "model,rows,bf16_ms", "dream-7b,64,3.9"))
    assert (row.rows, row.bf16, row.fp8, row.head) == (64, 0.0039, None, None)
