"""The Fast-dLLM baseline gives the golden cases' tokens in the golden cases' number of passes."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.fast_dllm import Decoding, Eos, Rule, generate
from baselines.llada_dense import DenseLlada, Shape

REPOSITORY = Path(__file__).parents[2]


def golden_folder() -> Path:
    """The repository's copy of the cases, or the shared original."""
    copied = REPOSITORY / "tests" / "golden"
    if copied.is_dir():
        return copied
    return Path(os.environ.get("SANGAM_SHARED", REPOSITORY.parent / "shared")) / "golden"


def dual_cases() -> list[dict[str, Any]]:
    cases = json.loads((golden_folder() / "llada_cases.json").read_text(encoding="utf-8"))
    return [case for case in cases if case["cache"] == "dual"]


@cache
def model_named(name: str) -> DenseLlada:
    return DenseLlada.from_folder(golden_folder() / "models" / name)


def decoding_of(case: dict[str, Any]) -> Decoding:
    params = case["params"]
    rule = Rule(case["mode"])
    num_blocks = params["gen_length"] // params["block_length"]
    value = {
        Rule.THRESHOLD: params["threshold"],
        Rule.FIXED: (params["steps"] or 0) // num_blocks,
        Rule.FACTOR: params["factor"],
    }[rule]
    if not params["early_stop"]:
        return Decoding(rule, value)
    return Decoding(rule, value, Eos.FILL, frozenset({params["eos_id"]}))


def random_model(seed: int = 0, vocab: int = 40, mask_id: int = 39) -> DenseLlada:
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "attn_norm": (32,), "ff_norm": (32,), "q_proj": (32, 32), "k_proj": (16, 32),
        "v_proj": (16, 32), "attn_out": (32, 32), "ff_proj": (48, 32), "up_proj": (48, 32),
        "ff_out": (32, 48),
    }  # fmt: skip
    prefix = "model.transformer."
    shapes = {f"{prefix}blocks.0.{name}.weight": size for name, size in sizes.items()}
    shapes |= {f"{prefix}wte.weight": (vocab, 32), f"{prefix}ln_f.weight": (32,)}
    shapes |= {f"{prefix}ff_out.weight": (vocab, 32)}
    tensors = {name: torch.randn(size, generator=generator) for name, size in shapes.items()}
    return DenseLlada(Shape(1, 4, 2, 8, 1e-5, 10000.0, 128, mask_id), tensors)


@pytest.mark.parametrize("case", dual_cases(), ids=lambda case: case["id"])
def test_a_golden_case_comes_out_token_for_token(case: dict[str, Any]) -> None:
    params = case["params"]
    made = generate(
        model_named(case["model"]),
        case["prompt_ids"],
        params["gen_length"],
        params["block_length"],
        decoding_of(case),
    )
    assert made.ids == case["output_ids"]
    assert made.num_passes == case["nfe"]


def test_an_answer_ends_at_an_eos_that_has_no_mask_before_it() -> None:
    model, prompt = random_model(), [1, 2, 3]
    whole = generate(model, prompt, 32, 16, Decoding(Rule.FIXED, 16))
    eos = whole.ids[len(prompt) + 5]
    ended = generate(model, prompt, 32, 16, Decoding(Rule.FIXED, 16, Eos.END, frozenset({eos})))
    first = ended.ids[len(prompt) :].index(eos)
    assert 39 not in ended.ids[len(prompt) : len(prompt) + first]
    assert ended.num_passes < whole.num_passes
    assert len(ended.ids) == len(whole.ids)


def test_a_predicted_mask_is_never_committed() -> None:
    model = random_model()
    model.head = model.head.clone()
    model.head[39] = 50.0 * model.head[7]  # the mask's row now wins wherever token 7's is positive
    made = generate(model, [1, 2, 3], 32, 16, Decoding())
    assert 39 not in made.ids


def test_a_length_of_no_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        generate(random_model(), [1], 20, 16, Decoding())


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="the model takes 128"):
        generate(random_model(), [1] * 100, 32, 16, Decoding())
