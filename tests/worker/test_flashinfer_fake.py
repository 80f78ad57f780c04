"""The fake of FlashInfer: as the library's signatures and documentation say."""

import inspect
from collections.abc import Callable

import pytest
import torch
from tests.worker.flashinfer_fake import SIGNATURES, FakeFlashInfer, append_paged_kv_cache
from tests.worker.flashinfer_installed import installed_signatures
from tests.worker.graph_fake import RecordedCapture, Tape
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


# What the library refuses, or takes for something else


def rows_of(width: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.randn(16, width).to(dtype)


def a_rotation(**changes: Tensor) -> Callable[[], object]:
    given = {
        "positions": torch.arange(16),
        "query": torch.randn(16, 3, 64).to(BFLOAT16),
        "key": torch.randn(16, 1, 64).to(BFLOAT16),
        "cos_sin_cache": torch.randn(16, 64),
    }
    given |= changes
    return lambda: FakeFlashInfer().apply_rope_with_cos_sin_cache_inplace(
        given["positions"], given["query"], given["key"], 64, given["cos_sin_cache"]
    )


REFUSED: dict[str, Callable[[], object]] = {
    "a norm's weight in float32 would be read as bfloat16": lambda: FakeFlashInfer().rmsnorm(
        rows_of(64), torch.ones(64)
    ),
    "rows that start between vectors": lambda: FakeFlashInfer().rmsnorm(
        rows_of(68)[:, 2:66], torch.ones(64).to(BFLOAT16)
    ),
    "rows that are an odd number of bytes apart": lambda: FakeFlashInfer().rmsnorm(
        rows_of(68)[:, :64], torch.ones(64).to(BFLOAT16)
    ),
    "the gate reads rows as if they were contiguous": lambda: FakeFlashInfer().silu_and_mul(
        rows_of(256)[:, :128]
    ),
    "fewer positions than rows": a_rotation(positions=torch.arange(8)),
    "other rows of keys than of queries": a_rotation(key=torch.randn(8, 1, 64).to(BFLOAT16)),
    "a table of another width": a_rotation(cos_sin_cache=torch.randn(16, 32)),
}


def test_what_is_right_of_those_is_taken() -> None:
    FakeFlashInfer().rmsnorm(rows_of(128)[:, 8:72], torch.ones(64).to(BFLOAT16))
    FakeFlashInfer().silu_and_mul(rows_of(128))
    a_rotation()()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_is(name: str) -> None:
    with pytest.raises((AssertionError, TypeError)):
        REFUSED[name]()


def a_planned_wrapper(num_workspace_bytes: int, num_blocks: int) -> None:
    """Dream-7B's heads over 2,048 tokens each."""
    workspace = torch.empty(num_workspace_bytes, dtype=torch.uint8)
    wrapper = FakeFlashInfer().BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2")
    qo, kv = (torch.arange(num_blocks + 1).mul(each).int() for each in (32, 128))
    last = torch.full((num_blocks,), 16).int()
    wrapper.plan(qo, kv, torch.zeros(kv[-1]).int(), last, 28, 4, 128, 16)


def test_a_workspace_that_is_too_small_for_what_is_split_is_refused() -> None:
    """Two tiles of 128 queries, each over 16 parts of 8 pages: 28 heads of 32 partial results."""
    needed = 28 * 32 * 128 * (128 + 1) * 4
    a_planned_wrapper(needed, 1)
    a_planned_wrapper(16, 64)  # enough tiles without parts
    with pytest.raises(AssertionError, match="Buffer overflow"):
        a_planned_wrapper(needed - 64, 1)


def test_a_capture_refuses_what_a_graph_cannot_hold() -> None:
    fake, x = FakeFlashInfer(), torch.randn(4)
    for run in (
        lambda: x.sum().item(),
        lambda: torch.tensor([1, 2]),
        lambda: x[x > 0],
        lambda: fake.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(16, dtype=torch.uint8), backend="fa2"
        ),
    ):
        with pytest.raises(AssertionError), Tape():
            run()


def test_a_recorded_replay_reads_what_lies_there_and_nothing_of_the_host() -> None:
    fake, x = FakeFlashInfer(), rows_of(64)
    weight, factor, results = torch.ones(64).to(BFLOAT16), 2, []

    def run() -> None:
        results[:] = [fake.rmsnorm(x, weight) * factor]

    replay = RecordedCapture()(run)
    (captured,) = results
    x.copy_(rows_of(64))
    factor, weight = 3, torch.zeros(64).to(BFLOAT16)
    replay()
    assert results[0] is captured
    wanted = FakeFlashInfer().rmsnorm(x, torch.ones(64).to(BFLOAT16)) * 2
    assert torch.equal(captured, wanted)
