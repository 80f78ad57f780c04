"""Floors are counted operator by operator, and agree with what profiles call a roofline."""

import pytest

from benchmarks.gpu.goals import GOALS, goals_table
from benchmarks.gpu.roofline import floor_seconds, operators_of
from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.shapes import DREAM_7B, LLADA_8B, ModelShape

H200 = Gpu(bf16_flops=781e12, fp8_flops=1400e12, bytes_per_second=4.27e12, memory_bytes=141e9)


def decode(blocks: int, context: int = 1024) -> Iteration:
    return Iteration(0, blocks, context, BLOCK_LENGTH)


def products_ms(shape: ModelShape, iteration: Iteration) -> float:
    names = {"qkv", "attention out", "gate and up", "down"}
    found = operators_of(shape, iteration)
    return 1000 * sum(item.seconds(H200) for item in found if item.name in names)


@pytest.mark.parametrize(
    ("shape", "blocks", "profiled_ms"),
    [(LLADA_8B, 1, 3.272), (LLADA_8B, 64, 36.6), (DREAM_7B, 1, 3.059), (DREAM_7B, 32, 17.11)],
)
def test_products_floors_are_the_profiles(
    shape: ModelShape, blocks: int, profiled_ms: float
) -> None:
    """``h200-gemms.csv``, all rows masked so that the last layer leaves nothing out; it does not
    count the activations, up to 2 %."""
    assert products_ms(shape, decode(blocks)) == pytest.approx(profiled_ms, rel=0.025)


def test_attention_reads_every_key_once_and_computes_each_pair() -> None:
    attention = next(o for o in operators_of(LLADA_8B, decode(8)) if o.name == "attention")
    keys = 8 * 1024 * LLADA_8B.kv_bytes_per_token
    assert keys < attention.num_bytes < 1.1 * keys
    assert attention.flops == 4 * 4096 * 32 * (8 * 32 * 1024)


def test_the_sum_over_operators_is_more_than_the_larger_of_the_sums() -> None:
    iteration = decode(32)
    found = operators_of(LLADA_8B, iteration)
    whole = max(
        sum(o.num_bytes for o in found) / H200.bytes_per_second,
        sum(o.flops for o in found) / H200.bf16_flops,
    )
    assert floor_seconds(LLADA_8B, iteration, H200) > 1.1 * whole


def test_fp8_products_are_cheaper_and_the_rest_is_not() -> None:
    iteration = Iteration(2048, 0, 2048, BLOCK_LENGTH)
    bf16 = {o.name: o.seconds(H200) for o in operators_of(LLADA_8B, iteration)}
    fp8 = {o.name: o.seconds(H200) for o in operators_of(LLADA_8B, iteration, is_fp8=True)}
    assert fp8["down"] < 0.6 * bf16["down"]
    assert fp8["attention"] == bf16["attention"]
    assert fp8["head"] == bf16["head"]


def test_rows_without_masks_cost_no_head() -> None:
    few = operators_of(DREAM_7B, Iteration(0, 8, 1024, 1))
    many = operators_of(DREAM_7B, decode(8))
    heads = [next(o for o in each if o.name == "head") for each in (few, many)]
    assert heads[0].flops * 32 == heads[1].flops


def test_floors_lie_below_what_was_measured_and_not_far() -> None:
    for iteration, measured_ms in (
        (decode(1), 5.452),
        (decode(8), 8.6864),
        (decode(32), 30.8229),
        (Iteration(2048, 0, 2048, BLOCK_LENGTH), 51.621),
    ):
        floor_ms = 1000 * floor_seconds(LLADA_8B, iteration, H200)
        assert 0.6 * measured_ms < floor_ms < measured_ms


def parts_with(total_ms: float) -> dict[str, dict[str, object]]:
    line = {
        "launch": "graph", "prefill_tokens": 0, "decode_blocks": 8, "context_tokens": 1024,
        "total_ms": total_ms, "floor_ms": 6.1,
    }  # fmt: skip
    return {
        "decodes llada-8b": {"status": "done", "found": {"lines": [line]}},
        "batch 1 step llada-8b": {"status": "done", "found": {"ratio": 5.4}},
    }


def test_goals_are_met_or_missed_by_so_much() -> None:
    title = "| llada-8b decode pass, graph, context 1024, 8 blocks |"
    assert f"{title} 7.8 ms | 6.1 | 8.69 | <= 7.8 ms | met |" in goals_table(parts_with(7.8))
    table = goals_table(parts_with(8.58))
    assert f"{title} 8.58 ms | 6.1 | 8.69 | <= 7.8 ms | missed by 10 % |" in table
    assert "| 5.4 x |  | 6.07 | >= 6 x | missed by 10 % |" in table
    assert table.count("not measured") == len(GOALS) - 2
