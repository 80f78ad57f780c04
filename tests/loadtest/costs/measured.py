"""Measurements for tests: made from a table, so that a fit can be held against it, or real ones."""

import csv
from dataclasses import replace
from pathlib import Path

from sangam_loadtest.costs.batch import PassBatch
from sangam_loadtest.costs.comparisons import Predictor
from sangam_loadtest.costs.constants import (
    AttentionConstants,
    LaunchConstants,
    ProductConstants,
    SamplingConstants,
    SmallConstants,
)
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.measurements import (
    MeasuredPass,
    MeasuredProducts,
    Measurements,
    read_fp8_passes,
    read_passes,
    read_products,
)
from sangam_loadtest.costs.operators import BF16, FP8
from sangam_loadtest.costs.table import Table, read_table

REPOSITORY = Path(__file__).parents[3]
PROFILES = Path(__file__).parent / "profiles"
"""The H200's profile; its README says how it was measured."""


def h200() -> Measurements:
    """All of the H200's profile that a fit takes."""
    quantized = [
        row for row in read_fp8_passes(PROFILES / "h200-fp8.csv") if row.quantization == FP8
    ]
    return Measurements(
        (*read_passes(PROFILES / "h200-passes.csv"), *quantized),
        read_products(PROFILES / "h200-gemms.csv"),
    )


def a_batch(prefill: int = 0, blocks: int = 0, keys: int = 1024, masks: int = 32) -> PassBatch:
    num_prefills = 1 if prefill else 0
    return PassBatch(
        num_decodes=blocks,
        decode_rows=32 * blocks,
        decode_keys=blocks * keys,
        decode_row_keys=32 * blocks * keys,
        num_prefills=num_prefills,
        prefill_rows=prefill,
        prefill_square_rows=prefill**2,
        head_rows=32 * num_prefills + masks * blocks,
    )


def a_pass(batch: PassBatch, **changed: object) -> MeasuredPass:
    """A line that was measured to take a second; see ``predicted``."""
    values: dict[str, object] = {
        "place": "made up",
        "model": "llada-8b",
        "engine": "fused-fa3",
        "launch": "graph",
        "quantization": BF16,
        "batch": batch,
        "total": 1.0,
        "without_attention": 1.0,
        "host": None,
        "is_worker": False,
    }
    return MeasuredPass(**(values | changed))  # type: ignore[arg-type]


def predicted(table: Table, gpu: str, row: MeasuredPass) -> MeasuredPass:
    """The line as a device with exactly the table's constants would measure it."""
    model = Predictor(table, gpu).model_of(row)
    return replace(
        row,
        total=model.seconds(row.batch),
        without_attention=model.seconds_without_attention(row.batch),
        host=model.launch_seconds if row.launch == "eager" and not row.is_worker else None,
    )


def kernel_passes(table: Table, gpu: str) -> tuple[MeasuredPass, ...]:
    """A profile of one model's kernels, as the H200's: prefills, decodes, both launches."""
    batches = [a_batch(prefill) for prefill in (512, 1024, 2048, 4096)]
    batches += [a_batch(0, blocks, keys) for blocks in (1, 2, 8, 32) for keys in (512, 2048, 8192)]
    batches += [a_batch(2048, 16, 2048)]
    rows = [
        a_pass(batch, launch=launch, model=model, engine=engine)
        for batch in batches
        for launch in ("graph", "eager")
        for model, engine in (("llada-8b", "fused-fa3"), ("dream-7b", "fused-fa2"))
    ]
    return tuple(predicted(table, gpu, row) for row in rows)


def kernel_products(table: Table, gpu: str) -> tuple[MeasuredProducts, ...]:
    """Products alone, by rows."""
    predictor = Predictor(table, gpu)
    bare = [
        MeasuredProducts("made up", model, rows, 1.0, 1.0, 1.0)
        for model in ("llada-8b", "dream-7b")
        for rows in (32, 64, 128, 256, 512, 1024, 2048)
    ]
    return tuple(
        replace(
            row,
            bf16=predictor.products(row, BF16),
            fp8=predictor.products(row, FP8),
            head=predictor.head(row),
        )
        for row in bare
    )


def processor_table(**system: float) -> Table:
    """A CPU's constants: rates, and what a pass and a sequence take besides."""
    table = read_table()
    sangam = replace(
        table.systems["sangam"],
        head_rows="committable",
        **{"pass_seconds": 1e-3, "sequence_seconds": 2e-4, **system},
    )
    for section, entry, constants in (
        ("gpus", "a-cpu", Gpu(5e10, 5e10, 2e9, 16e9)),
        ("products", BF16, ProductConstants(0.1, 1.0, 4.0)),
        ("head", BF16, ProductConstants(1.0, 1.0, 4.0)),
        ("small", BF16, SmallConstants(0.0, 0.0)),
        ("launch", BF16, LaunchConstants(0.0, 0.0)),
        ("sampling", "fused", SamplingConstants(0.0, 0.0)),
        ("attention", "torch-mha", AttentionConstants(0.0, 3e-5, 1.0, 1.5, 4.0)),
        ("systems", "sangam", sangam),
    ):
        table = table.with_entry(section, entry, constants)
    return table


def worker_passes(
    table: Table,
    prefills: tuple[int, ...] = (0, 64, 256, 1024),
    blocks: tuple[int, ...] = (0, 1, 4, 16),
    model: str = "small",
) -> tuple[MeasuredPass, ...]:
    """A worker's iterations, as ``make bench-passes`` measures them."""
    batches = [
        a_batch(prefill, num, keys, masks)
        for prefill in prefills
        for num in blocks
        for keys in (64, 512, 1024)
        for masks in (4, 24)
        if prefill or num
    ]
    rows = [
        a_pass(batch, model=model, engine="sangam-torch", launch="eager", is_worker=True)
        for batch in batches
    ]
    return tuple(predicted(table, "a-cpu", row) for row in rows)


COLUMNS = (
    "model", "engine", "launch", "prefill_tokens", "decode_blocks", "context_tokens",
    "total_ms", "without_attention_ms", "host_ms", "rows_masked",
)  # fmt: skip


def write_passes(path: Path, rows: tuple[MeasuredPass, ...]) -> Path:
    """Lines as a CSV; ``rows_masked`` where they are a worker's."""
    names = COLUMNS if rows[0].is_worker else COLUMNS[:-1]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            batch = row.batch
            writer.writerow(
                {
                    "model": row.model,
                    "engine": row.engine,
                    "launch": row.launch,
                    "prefill_tokens": batch.prefill_rows,
                    "decode_blocks": batch.num_decodes,
                    "context_tokens": batch.decode_keys // max(1, batch.num_decodes) or 1,
                    "total_ms": row.total * 1000,
                    "without_attention_ms": (row.without_attention or 0) * 1000,
                    "host_ms": "" if row.host is None else row.host * 1000,
                    "rows_masked": batch.head_rows,
                }
            )
    return path
