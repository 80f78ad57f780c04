"""Reads measured costs: whole passes, products alone, and passes with FP8 products, as CSV.

Decides the columns and what each line means as a batch; a bad value is an error with file, line
and column. What is fitted to them is ``fit``'s. Written by ``make bench-passes``, or by profiles
with the same columns.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sangam_core.errors import ConfigurationError
from sangam_loadtest.costs.batch import PassBatch
from sangam_loadtest.costs.operators import BF16, BLOCK_ROWS, FP8

FP8_ENGINE = "fused-fa2"
"""Engine of passes with FP8 products, where the file has no such column."""


class MeasurementError(ConfigurationError):
    """A file of measurements cannot be used."""


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """One line of whole passes; times in seconds.

    Attributes:
        place: file and line. engine: what ran it; the part behind the last hyphen names the
            attention backend. launch: ``eager`` or ``graph``.
        without_attention: the same with the attention's call left out. host: time to issue it.
        is_worker: a worker's whole iteration, scheduler and sampling included; else a forward
            pass of all layers with the head on 32 rows a sequence, all layers on all rows.
    """

    place: str
    model: str
    engine: str
    launch: str
    quantization: str
    batch: PassBatch
    total: float
    without_attention: float | None
    host: float | None
    is_worker: bool

    @property
    def backend(self) -> str:
        """The attention backend."""
        return self.engine.rpartition("-")[2]

    @property
    def label(self) -> str:
        """The pass in words."""
        batch = self.batch
        keys = batch.decode_keys // batch.num_decodes if batch.num_decodes else 0
        parts = [f"prefill {batch.prefill_rows}"] if batch.num_prefills else []
        parts += [f"{batch.num_decodes} x {keys} keys"] if batch.num_decodes else []
        return f"{self.model} {self.engine} {self.launch} {' + '.join(parts)}"


@dataclass(frozen=True, slots=True)
class MeasuredProducts:
    """Products of all layers on so many rows, and the head on as many; times in seconds."""

    place: str
    model: str
    rows: int
    bf16: float
    fp8: float | None
    head: float | None

    @property
    def label(self) -> str:
        """The products in words."""
        return f"{self.model} {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Measurements:
    """All that a fit is made from."""

    passes: tuple[MeasuredPass, ...] = ()
    products: tuple[MeasuredProducts, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """Models measured, in order of appearance."""
        of_passes = [row.model for row in self.passes]
        return tuple(dict.fromkeys([*of_passes, *(row.model for row in self.products)]))


def read_passes(path: Path) -> tuple[MeasuredPass, ...]:
    """Whole passes: a profile's lines, or a worker's where there is a column ``rows_masked``.

    Raises:
        MeasurementError: the file cannot be read, lacks a column, or holds a bad value.
    """
    return tuple(_pass(line) for line in _lines(path))


def read_fp8_passes(path: Path) -> tuple[MeasuredPass, ...]:
    """Passes measured twice, with bf16 and with FP8 products: each line gives two.

    Raises:
        MeasurementError: as ``read_passes``.
    """
    return tuple(
        MeasuredPass(
            place=line.place,
            model=line.word("model"),
            engine=line.word("engine", FP8_ENGINE),
            launch=line.launch(),
            quantization=quantization,
            batch=_batch(line, None),
            total=line.seconds(column),
            without_attention=None,
            host=None,
            is_worker=False,
        )
        for line in _lines(path)
        for quantization, column in ((BF16, "bf16_ms"), (FP8, "fp8_ms"))
    )


def read_products(path: Path) -> tuple[MeasuredProducts, ...]:
    """Products alone.

    Raises:
        MeasurementError: as ``read_passes``.
    """
    return tuple(
        MeasuredProducts(
            place=line.place,
            model=line.word("model"),
            rows=line.count("rows", least=1),
            bf16=line.seconds("bf16_ms"),
            fp8=line.optional_seconds("fp8_ms"),
            head=line.optional_seconds("head_bf16_ms"),
        )
        for line in _lines(path)
    )


def _pass(line: "_Line") -> MeasuredPass:
    is_worker = line.has("rows_masked")
    return MeasuredPass(
        place=line.place,
        model=line.word("model"),
        engine=line.word("engine"),
        launch=line.launch(),
        quantization=BF16,
        batch=_batch(line, line.count("rows_masked") if is_worker else None),
        total=line.seconds("total_ms"),
        without_attention=line.optional_seconds("without_attention_ms"),
        host=line.optional_seconds("host_ms"),
        is_worker=is_worker,
    )


def _batch(line: "_Line", head_rows: int | None) -> PassBatch:
    prefill, blocks = line.count("prefill_tokens"), line.count("decode_blocks")
    if not prefill and not blocks:
        raise line.error("decode_blocks", "and prefill_tokens must not both be 0")
    keys = blocks * line.count("context_tokens", least=1)
    sequences = blocks + (1 if prefill else 0)
    return PassBatch(
        num_decodes=blocks,
        decode_rows=blocks * BLOCK_ROWS,
        decode_keys=keys,
        decode_row_keys=keys * BLOCK_ROWS,
        num_prefills=1 if prefill else 0,
        prefill_rows=prefill,
        prefill_square_rows=prefill**2,
        head_rows=sequences * BLOCK_ROWS if head_rows is None else head_rows,
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a CSV, with typed access to its columns."""

    place: str
    values: dict[str, str]

    def error(self, column: str, problem: str) -> MeasurementError:
        return MeasurementError(f"{self.place}: {column} {problem}")

    def has(self, column: str) -> bool:
        return column in self.values

    def word(self, column: str, default: str | None = None) -> str:
        value = self.values.get(column, default)
        if value is None:
            raise self.error(column, f"is no column; there are: {', '.join(self.values)}")
        if not value:
            raise self.error(column, "is empty")
        return value

    def launch(self) -> str:
        value = self.word("launch")
        if value not in ("eager", "graph"):
            raise self.error("launch", f"must be eager or graph, not {value!r}")
        return value

    def count(self, column: str, least: int = 0) -> int:
        value = self.word(column)
        number = int(value) if value.isascii() and value.isdigit() else -1
        if not least <= number <= 2**31:
            raise self.error(column, f"must be a whole number >= {least}, not {value!r}")
        return number

    def seconds(self, column: str) -> float:
        value = self.word(column)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise self.error(column, f"must be milliseconds above 0, not {value!r}")
        return number / 1000

    def optional_seconds(self, column: str) -> float | None:
        return self.seconds(column) if self.values.get(column) else None


def _lines(path: Path) -> Iterator[_Line]:
    line, header = 1, list[str]()
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            for row in reader:
                line = reader.line_num
                if not row:
                    continue
                place = f"{path}, line {line}"
                if len(row) != len(header):
                    told = f"{len(row)} values where the header names {len(header)}"
                    raise MeasurementError(f"{place}: {told}")
                cells = (value.strip() for value in row)
                yield _Line(place, dict(zip(header, cells, strict=True)))
    except OSError as error:
        raise MeasurementError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MeasurementError(f"{path}: not a text file in UTF-8 ({error.reason})") from error
    except csv.Error as error:
        raise MeasurementError(f"{path}, line {line + 1}: {error}") from error
    if line == 1:
        raise MeasurementError(f"{path}: holds no measurements, at most a header")
