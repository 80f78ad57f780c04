"""Floors are counted operator by operator, and agree with what profiles call a roofline."""

from pathlib import Path

import pytest

from benchmarks.gpu.goals import GOALS, goals_table, readme_rows
from benchmarks.gpu.roofline import floor_seconds, operators_of
from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_loadtest.costs.gpus import Gpu
from sangam_loadtest.costs.shapes import DREAM_7B, LLADA_8B, ModelShape

REPOSITORY = Path(__file__).parents[3]
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
    met = f"{title} 7.8 ms | 6.1 | 1.28x | 8.69 | <= 7.8 ms | met |"
    assert met in goals_table(parts_with(7.8))
    table = goals_table(parts_with(8.58))
    assert f"{title} 8.58 ms | 6.1 | 1.41x | 8.69 | <= 7.8 ms | missed by 10 % |" in table
    assert "| 5.4 x |  |  | 6.07 | >= 6 x | missed by 10 % |" in table
    assert table.count("not measured") == len(GOALS) - 2


def profiled(by_class: dict[str, float]) -> dict[str, dict[str, object]]:
    line = {
        "prefill_tokens": 0, "decode_blocks": 8, "context_tokens": 1024,
        "by_class_ms": by_class, "floor_ms": {"products": 4.9, "attention": 1.1},
    }  # fmt: skip
    return {"breakdown llada-8b": {"status": "done", "found": {"passes": [line]}}}


def test_a_missed_goal_names_what_is_furthest_above_its_floor() -> None:
    parts = parts_with(8.58) | profiled({"products": 5.6, "attention": 2.2, "copies": 0.3})
    assert "missed by 10 %: attention 2.2 ms over a floor of 1.1 |" in goals_table(parts)
    parts = parts_with(8.58) | profiled({"products": 5.0, "attention": 1.2, "other": 2.0})
    assert "missed by 10 %: other 2 ms |" in goals_table(parts)


def test_rows_for_the_readme_are_as_in_its_table() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    rows = readme_rows(parts_with(7.8)).splitlines()
    titles = [row.split("|")[1].strip() for row in rows]
    assert len(titles) == 6
    assert titles[0] == "LLaDA-8B decode pass by graph, context 1,024: 1 / 8 / 32"
    assert rows[0].endswith(
        "| - / 6.1 / - ms | 5.45 / 8.69 / 30.8 ms | 5 / 7.8 / 28 ms "
        "| - / 7.8 (1.28x) / - ms: not measured; met; not measured |"
    )
    known = " ".join(readme.split())
    assert [title for title in titles[3:] if title not in known] == []
    marks = [row.split("|")[3].strip() for row in rows]
    assert [mark for mark in marks[3:4] if mark not in known] == []


# By hand


def test_a_decode_passs_bytes_and_flops_by_hand() -> None:
    """LLaDA-8B, 8 blocks at 1,024: 256 rows, every one of them masked."""
    found = {o.name: o for o in operators_of(LLADA_8B, decode(8))}
    rows, layers, hidden, mlp, vocab = 256, 32, 4096, 12288, 126464
    weights = {"qkv": hidden * 3 * hidden, "attention out": hidden**2,
               "gate and up": 2 * hidden * mlp, "down": mlp * hidden}  # fmt: skip
    sides = {"qkv": 4 * hidden, "attention out": 2 * hidden,
             "gate and up": hidden + 2 * mlp, "down": mlp + hidden}  # fmt: skip
    for name, count in weights.items():
        assert found[name].flops == layers * 2 * rows * count
        moved = layers * 2 * (count + rows * sides[name])
        assert found[name].num_bytes == pytest.approx(moved, rel=1e-3)
    assert sum(weights.values()) * layers * 2 == pytest.approx(13.96e9, rel=1e-3)
    assert found["head"].flops == 2 * rows * hidden * vocab
    assert found["head"].num_bytes == 2 * (hidden * vocab + rows * (hidden + vocab))
    keys_values = 8 * 1024 * 2 * 32 * 128 * 2 * layers
    assert keys_values == 4_294_967_296
    assert found["attention"].num_bytes == keys_values + layers * 2 * rows * hidden * 2
    assert 1000 * floor_seconds(LLADA_8B, decode(8), H200) == pytest.approx(6.4, abs=0.1)


def test_a_prefills_bytes_and_flops_by_hand() -> None:
    """Dream-7B, 2,048 tokens: in the last layer only 32 rows go on after K and V."""
    iteration = Iteration(2048, 0, 2048, BLOCK_LENGTH)
    found = {o.name: o for o in operators_of(DREAM_7B, iteration)}
    rows, head, layers, hidden, mlp = 2048, 32, 28, 3584, 18944
    query, both = 28 * 128, 2 * 4 * 128
    qkv = 27 * rows * (query + both) + rows * both + head * query
    assert found["qkv"].flops == 2 * hidden * qkv
    assert found["gate and up"].flops == 2 * hidden * 2 * mlp * (27 * rows + head)
    assert found["down"].flops == 2 * mlp * hidden * (27 * rows + head)
    assert found["attention"].flops == 4 * query * ((layers - 1) * rows**2 + head * rows)
    assert found["head"].flops == 2 * head * hidden * 152064
    total_flops = sum(o.flops for o in found.values())
    assert total_flops == pytest.approx(27.1e12, rel=0.02)
    assert 1000 * floor_seconds(DREAM_7B, iteration, H200) == pytest.approx(37.9, abs=0.4)
