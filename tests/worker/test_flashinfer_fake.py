"""The fake of FlashInfer: as the library's signatures and documentation say."""

import inspect
from collections.abc import Callable

import pytest
import torch
from tests.worker.flashinfer_fake import SIGNATURES, FakeFlashInfer, append_paged_kv_cache
from tests.worker.flashinfer_installed import installed_signatures
from torch import Tensor

BFLOAT16 = torch.bfloat16


def test_the_fake_takes_what_the_installed_library_takes() -> None:
    real = installed_signatures(*SIGNATURES)
    for name, function in SIGNATURES.items():
        theirs = real[name].parameters
        ours = inspect.signature(function).parameters
        for each in ours.values():
            default = each.empty if each.default is each.empty else repr(each.default)
            assert theirs[each.name].default == default, f"{name}: {each.name}"
        positional = [each.name for each in ours.values() if each.kind is not each.KEYWORD_ONLY]
        assert positional == list(theirs)[: len(positional)], name


def test_the_fake_appends_as_the_documentation_s_example_says() -> None:
    cache = torch.zeros(8, 2, 16, 1, 64, dtype=BFLOAT16)
    lengths = [45, 8, 25, 22]
    batch = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).int()
    positions = torch.cat([torch.arange(n) for n in lengths]).int()
    keys = torch.arange(1, 101).to(BFLOAT16).view(-1, 1, 1).repeat(1, 1, 64)
    pages = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0], dtype=torch.int32)
    indptr = torch.tensor([0, 3, 4, 6, 8], dtype=torch.int32)
    last = torch.tensor([13, 8, 9, 6], dtype=torch.int32)
    append_paged_kv_cache(keys, -keys, batch, positions, cache, pages, indptr, last)
    seen = cache[:, :, :, 0, 0].float()
    assert seen[7, 0].tolist() == list(range(1, 17))
    assert seen[5, 0].tolist() == [*range(33, 46), 0, 0, 0]
    assert seen[4, 1].tolist() == [*range(-46, -54, -1), *[0] * 8]
    assert seen[0, 0].tolist() == [*range(95, 101), *[0] * 10]


Change = Callable[[dict[str, Tensor]], None]


def take_another_page(arrays: dict[str, Tensor]) -> None:
    arrays["kv_indices"][0] = arrays["kv_indices"][3]


def drop_a_position(arrays: dict[str, Tensor]) -> None:
    arrays["last_page_len"][0] -= 1


def shift_the_queries(arrays: dict[str, Tensor]) -> None:
    arrays["qo_indptr"][1] += 1


def shift_the_pages(arrays: dict[str, Tensor]) -> None:
    arrays["kv_indptr"][1] -= 1


@pytest.mark.parametrize(
    "mistake", [take_another_page, drop_a_position, shift_the_queries, shift_the_pages]
)
def test_a_mistake_in_an_index_array_shows_in_the_fake_s_answer(mistake: Change) -> None:
    torch.manual_seed(0)
    cache, q = torch.randn(6, 2, 16, 1, 64), torch.randn(40, 2, 64)
    arrays = {
        "qo_indptr": torch.tensor([0, 32, 40]).int(),
        "kv_indptr": torch.tensor([0, 3, 6]).int(),
        "kv_indices": torch.tensor([4, 1, 0, 5, 2, 3]).int(),
        "last_page_len": torch.tensor([9, 16]).int(),
    }

    def answer() -> Tensor:
        workspace = torch.empty(16, dtype=torch.uint8)
        wrapper = FakeFlashInfer().BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2")
        wrapper.plan(*arrays.values(), 2, 1, 64, 16, q_data_type=torch.float32)
        return wrapper.run(q, cache)

    right = answer()
    mistake(arrays)
    assert not torch.allclose(answer(), right, atol=1e-3)
