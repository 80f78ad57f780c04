"""Pages of KV: what a GPU's memory leaves beside weights, activations and logits."""

import pytest

from sangam_core.errors import ConfigurationError
from sangam_loadtest.costs.capacity import activation_bytes, pool_pages
from sangam_loadtest.costs.shapes import LLADA_8B


def test_pages_are_what_is_left_beside_weights_activations_and_logits() -> None:
    taken = LLADA_8B.weight_bytes + activation_bytes(LLADA_8B, 8192) + 2048 * 126464 * 4
    pages = pool_pages("h100", "llada-8b")
    left = 0.9 * 80e9 - taken
    assert pages == left // (16 * LLADA_8B.kv_bytes_per_token)
    # ShareGPT's 1,800 tokens: about 56 requests at a time.
    assert 50 < pages * 16 / 1800 < 60


@pytest.mark.parametrize("model", ["llada-8b", "dream-7b"])
def test_more_memory_fewer_rows_and_smaller_weights_give_more_pages(model: str) -> None:
    pages = pool_pages("h100", model)
    assert pool_pages("h200", model) > 1.9 * pages
    assert pool_pages("h100", model, pass_rows=4096) > pages
    assert pool_pages("h100", model, quantization="fp8") > pages


def test_logits_of_every_row_cost_the_papers_system_pages() -> None:
    assert pool_pages("h100", "llada-8b", "paper") < pool_pages("h100", "llada-8b")
    narrow = pool_pages("h100", "llada-8b", "paper", pass_rows=4096)
    assert narrow > pool_pages("h100", "llada-8b", "paper", pass_rows=16384) + 300


def test_a_pass_that_leaves_no_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="leaves no memory for KV pages on h100"):
        pool_pages("h100", "llada-8b", "paper", pass_rows=500_000)
