"""Logits of single passes against the golden files and an independent dense transformer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.worker.checkpoints import (
    GOLDEN,
    an_engine,
    dream_config,
    llada_config,
    random_state,
    write_checkpoint,
)
from tests.worker.dense import dense_logits
from tests.worker.requests import a_pass, a_plan
from torch import Tensor

from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.engine import Engine

FAMILIES = ["llada", "dream"]
TOLERANCE = 1e-3
"""Of logits in float32 in another order of operations (the golden README)."""


def pages_for(num_tokens: int, *, first: int = 3) -> tuple[int, ...]:
    """Page numbers in no order."""
    count = -(-num_tokens // PAGE_TOKENS)
    return tuple(first + (7 * n) % count if count % 7 else first + n for n in range(count))


def raw_rows(engine: Engine, ids: list[int], rows: range, at: list[int], pages: Any) -> Tensor:
    """Raw logits of the rows of positions ``at`` (Dream: those predict the next position)."""
    shift = 1 if engine.model_config.family == "dream" else 0
    masked = [position + shift for position in at]
    item = a_pass(ids, rows=rows, masked=masked, pages=pages)
    return engine.forward(a_plan(item))[: len(at)]


# -- golden ----------------------------------------------------------------------------------


def entries(family: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / f"{family}_logits_index.json").read_text())
    return found


def golden_case(family: str, name: str) -> dict[str, Any]:
    cases = json.loads((GOLDEN / f"{family}_cases.json").read_text())
    found: dict[str, Any] = next(case for case in cases if case["id"] == name)
    return found


def ids_before(case: dict[str, Any], forward: int) -> list[int]:
    mask_id, length = case["params"]["mask_id"], case["params"]["gen_length"]
    ids = [*case["prompt_ids"], *[mask_id] * length]
    for item in case["forwards"][:forward]:
        for position, token, _ in item["writes"]:
            ids[position] = token
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits_come_out_with_and_without_cached_rows(family: str) -> None:
    wanted = load_file(GOLDEN / f"{family}_logits.safetensors")
    engine = an_engine(GOLDEN / "models" / f"{family}-tiny-a")
    num_cached = 0
    for entry in entries(family):
        case, forward = golden_case(family, entry["case"]), entry["forward"]
        pages = () if case["cache"] == "none" else pages_for(len(case["output_ids"]))
        full = max(n for n in range(forward + 1) if case["forwards"][n]["kind"] == "full")
        got = torch.empty(0)
        # Teacher forcing: every pass since the block's whole-sequence one, as the cache saw it.
        for number in range(full, forward + 1):
            ids, item = ids_before(case, number), case["forwards"][number]
            rows = range(item["start"], item["start"] + item["len"])
            got = (
                raw_rows(engine, ids, rows, entry["positions"], pages)
                if number == forward
                else (raw_rows(engine, ids, rows, [rows[0]], pages))
            )
        num_cached += forward > full
        assert ids_before(case, forward)[rows.start : rows.stop] == entry["input_ids"]
        assert (got - wanted[entry["key"]]).abs().max() < TOLERANCE, entry["key"]
    assert num_cached > 0


# -- dense -----------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "llada-mha": llada_config(),
    "llada-gqa": llada_config(n_kv_heads=2, rope_theta=10000.0),
    "llada-mqa-bias-tied": llada_config(n_kv_heads=1, include_qkv_bias=True, weight_tying=True),
    "llada-one-layer": llada_config(n_layers=1),
    "llada-odd-widths": llada_config(d_model=60, n_heads=3, n_kv_heads=3, mlp_hidden_size=100),
    "dream-gqa": dream_config(),
    "dream-mha-tied": dream_config(num_key_value_heads=4, tie_word_embeddings=True),
    "dream-head-dim": dream_config(head_dim=32, num_attention_heads=6, num_key_value_heads=3),
}
IDS = [(37 * n + 11) % 280 for n in range(45)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_pages", [True, False], ids=["paged", "ragged"])
def test_a_whole_sequence_matches_a_dense_transformer(
    tmp_path: Path, shape: str, has_pages: bool
) -> None:
    config, state = SHAPES[shape], random_state(SHAPES[shape], seed=3)
    engine = an_engine(write_checkpoint(tmp_path, config, state))
    pages = pages_for(len(IDS)) if has_pages else ()
    got = raw_rows(engine, IDS, range(len(IDS)), list(range(len(IDS))), pages)
    expected = dense_logits(config, state, IDS)
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("shape", ["llada-gqa", "dream-gqa"])
def test_bfloat16_stays_close_to_the_dense_transformer(tmp_path: Path, shape: str) -> None:
    config, state = SHAPES[shape], random_state(SHAPES[shape], seed=3)
    engine = an_engine(write_checkpoint(tmp_path, config, state), dtype="bfloat16")
    got = raw_rows(engine, IDS, range(len(IDS)), list(range(len(IDS))), pages_for(len(IDS)))
    assert got.dtype == torch.bfloat16
    expected = dense_logits(config, state, IDS)
    error = (got.float() - expected).abs()
    assert error.max() < 0.15 * expected.abs().max()
    assert error.mean() < 0.03 * expected.abs().mean() + 0.02


def test_a_block_pass_sees_its_new_rows_and_the_cached_ones(tmp_path: Path) -> None:
    """With the same ids a cached pass repeats the whole-sequence one."""
    config, state = SHAPES["llada-gqa"], random_state(SHAPES["llada-gqa"], seed=3)
    engine = an_engine(write_checkpoint(tmp_path, config, state))
    pages, at = pages_for(len(IDS)), [20, 21, 27]
    whole = raw_rows(engine, IDS, range(len(IDS)), at, pages)
    block = raw_rows(engine, IDS, range(20, 28), at, pages)
    assert (whole - block).abs().max() < TOLERANCE


def test_the_first_rows_of_a_sequence_predict_position_0_as_well_as_1_in_dream() -> None:
    engine = an_engine(GOLDEN / "models" / "dream-tiny-a")
    item = a_pass(IDS, masked=[0, 1, 2])
    rows = engine.forward(a_plan(item))
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])


def test_a_pass_that_commits_nothing_runs_no_head_but_writes_its_pages() -> None:
    engine = an_engine(GOLDEN / "models" / "llada-tiny-a")
    pages = pages_for(len(IDS))
    written = []
    for masked in ([], [9, 30]):
        for layer in engine.kv_pool.layers:
            layer.fill_(torch.nan)
        logits = engine.forward(a_plan(a_pass(IDS, masked=masked, pages=pages)))
        assert len(logits) == (16 if masked else 0)
        written.append([engine.kv_pool.gather(n, pages) for n in range(3)])
    for without, with_head in zip(*written, strict=True):
        assert torch.equal(without.nan_to_num(7.0), with_head.nan_to_num(7.0))
        num_written = (~without.isnan()).sum()
        assert num_written == len(IDS) * 2 * 4 * 16
