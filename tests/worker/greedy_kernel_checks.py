"""What a greedy kernel must do, wherever it runs: interpreted on a CPU, or on a GPU.

Each check takes the kernel; logits are made on the CPU. ``TorchGreedyKernel`` is the same in
torch and float64: what the checks compare with, and a stand-in for the real one.
"""

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from tests.worker.checkpoints import DREAM, LLADA
from torch import Tensor

from sangam_worker.models.config import read_model_config
from sangam_worker.sampling.candidates import Draw, Measure, propose
from sangam_worker.sampling.greedy import Column, GreedyKernel, confidences_of

INF, NAN = torch.inf, torch.nan
MASK = 3


class TorchGreedyKernel:
    """The kernel's promise in float64; remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, logits: Tensor, mask_id: int, num_columns: int) -> Tensor:
        self.calls.append((len(logits), num_columns))
        wide = logits.double()
        allowed = wide.clone()
        allowed[:, mask_id] = -INF
        tokens = (allowed == allowed.amax(-1, keepdim=True)).byte().argmax(-1)
        tokens[(allowed.amax(-1) == -INF) & (tokens == mask_id)] = int(mask_id == 0)
        probabilities = torch.softmax(wide, -1)
        own = probabilities.gather(-1, tokens[:, None])[:, 0]
        rivals = probabilities.scatter(-1, tokens[:, None], -1.0).amax(-1)
        negative_entropy = torch.xlogy(probabilities, probabilities).sum(-1)
        columns = torch.stack((tokens.double(), own, rivals, negative_entropy), 1)
        return columns[:, :num_columns]


def random_rows(num_rows: int, vocab_size: int, spread: float = 4.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def compare(kernel: GreedyKernel, logits: Tensor, mask_id: int = MASK) -> Tensor:
    """The kernel's summary, once it is as it should be."""
    expected = TorchGreedyKernel()(logits, mask_id, 4)
    got = kernel(logits, mask_id, 4)
    assert got.dtype == torch.float64
    assert got.shape == expected.shape
    is_number = ~expected[:, 1].isnan()
    assert torch.equal(got[:, 1:].isnan().all(1), ~is_number)
    assert torch.equal(got[is_number, 0], expected[is_number, 0])
    torch.testing.assert_close(got[is_number, 1:3], expected[is_number, 1:3], rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(got[is_number, 3], expected[is_number, 3], rtol=1e-5, atol=1e-6)
    assert (got[:, 0] >= 0).all()
    assert (got[:, 0] < logits.shape[1]).all()
    short = kernel(logits, mask_id, 2)
    assert short.shape == (len(logits), 2)
    # Another program of the same code: its sums may be rounded otherwise.
    assert torch.equal(short[is_number, 0], got[is_number, 0])
    torch.testing.assert_close(short[is_number, 1], got[is_number, 1], rtol=1e-5, atol=1e-30)
    return got


def vocabularies_of_any_size(kernel: GreedyKernel) -> None:
    for vocab_size in (4, 5, 17, 4095, 4096, 4097, 9001):
        for dtype in (torch.float32, torch.bfloat16):
            compare(kernel, random_rows(2, vocab_size).to(dtype), mask_id=min(MASK, vocab_size - 1))


def the_mask_token_anywhere(kernel: GreedyKernel) -> None:
    logits = random_rows(1, 4200)
    for mask_id in (0, 1, 4095, 4096, 4199):
        logits[:, mask_id] = 20.0
        assert compare(kernel, logits, mask_id)[0, Column.TOKEN] != mask_id


def of_equals_the_lowest_id(kernel: GreedyKernel) -> None:
    logits = torch.zeros(4, 9000)
    logits[0, [8999, 4200, 17, 8000]] = 5.0
    logits[1, [MASK, 4500]] = 5.0
    logits[2, 0] = -0.0
    logits[3] = -1e30
    tokens = compare(kernel, logits)[:, Column.TOKEN].tolist()
    assert tokens == [17, 4500, 0, 0]


def infinities_and_what_is_no_number(kernel: GreedyKernel) -> None:
    rows = {
        "all but one": [-INF, -INF, 2.0, -INF, -INF],
        "the mask alone": [-INF, -INF, -INF, 1.0, -INF],
        "nothing": [-INF, -INF, -INF, -INF, -INF],
        "without a mask": [0.0, 1.0, -INF, -INF, 2.0],
        "plus": [0.0, INF, 0.0, 0.0, 0.0],
        "plus twice": [0.0, INF, 0.0, 0.0, INF],
        "plus at the mask": [0.0, 0.0, 0.0, INF, 0.0],
        "both": [0.0, INF, -INF, 0.0, -INF],
        "not a number": [0.0, NAN, 0.0, 0.0, 0.0],
        "not a number at the mask": [0.0, 0.0, 0.0, NAN, 0.0],
        "no numbers": [NAN] * 5,
        "far apart": [1e30, -1e30, 0.0, 0.0, 1.0],
        "far below": [-3e38, -3e38, -INF, -3e38, -3.1e38],
    }
    got = compare(kernel, torch.tensor(list(rows.values())))
    by_name = dict(zip(rows, got.tolist(), strict=True))
    assert by_name["all but one"] == [2.0, 1.0, 0.0, 0.0]
    assert by_name["the mask alone"] == [0.0, 0.0, 1.0, 0.0]
    assert {name for name, row in by_name.items() if row[1] != row[1]} == {
        "nothing",
        "plus",
        "plus twice",
        "plus at the mask",
        "both",
        "not a number",
        "not a number at the mask",
        "no numbers",
    }
    late = torch.zeros(3, 9000)
    late[0, 8999], late[1, 4100], late[2, :5000] = NAN, INF, -INF
    assert compare(kernel, late)[:, 1].isnan().tolist() == [True, True, False]
    assert kernel(torch.full((1, 5), -INF), 0, 2)[0, 0] == 1  # the lowest that is not the mask


def confidences_next_to_one_stay_apart(kernel: GreedyKernel) -> None:
    """In float32 all three would be 1; ranks by confidence would fall back to positions."""
    logits = torch.zeros(3, 5000)
    logits[:, 4500] = torch.tensor([30.0, 31.0, 40.0])
    missing = 1.0 - kernel(logits, MASK, 2)[:, 1]
    expected = 4999 * torch.exp(-logits[:, 4500].double())
    torch.testing.assert_close(missing, expected, rtol=1e-4, atol=2e-16)
    assert missing[0] > missing[1] > missing[2] > 0


def rows_and_entries_with_any_stride(kernel: GreedyKernel) -> None:
    storage = random_rows(12, 4300).bfloat16()
    for logits in (
        storage[::3],
        storage[:, 5:4200],
        storage[:3, ::2],
        storage[:, :7].T,
        storage[:1].expand(3, -1),
        storage[:0],
    ):
        compare(kernel, logits)


def a_row_alone_and_among_others(kernel: GreedyKernel) -> None:
    logits = random_rows(6, 5000)
    together = kernel(logits, MASK, 4)
    for row in range(6):
        assert torch.equal(kernel(logits[row : row + 1], MASK, 4), together[row : row + 1])


def any_few_logits(kernel: GreedyKernel) -> None:
    values = st.one_of(
        st.sampled_from([-INF, -1.0, 0.0, 0.5, 1.0]),
        st.floats(-80, 80, width=32),
        st.sampled_from([INF, NAN]),
    )
    rows = st.integers(2, 9).flatmap(
        lambda size: st.tuples(
            st.lists(values, min_size=size, max_size=size), st.integers(0, size - 1)
        )
    )

    @settings(max_examples=25)
    @given(rows, st.sampled_from([torch.float32, torch.bfloat16]))
    def hold(given_row: tuple[list[float], int], dtype: torch.dtype) -> None:
        row, mask_id = given_row
        compare(kernel, torch.tensor([row], dtype=dtype), mask_id)

    hold()


def the_confidences_of_both_families_rules(kernel: GreedyKernel) -> None:
    """Against ``propose``: equal tokens, and confidences within a rounding of the dtype."""
    for folder, measures in ((LLADA, [Measure.PROBABILITY]), (DREAM, list(Measure))):
        config = read_model_config(folder)
        for dtype, spread in ((torch.float32, 1.0), (torch.float32, 9.0), (torch.bfloat16, 3.0)):
            logits = random_rows(3, config.vocab_size, spread).to(dtype)
            summary = kernel(logits, config.mask_id, 4)
            for measure in measures:
                draw = Draw(config.family, 0.0, 1.0, 0, measure)
                tokens, confidences = propose(logits, draw, torch.tensor([]), config.mask_id)
                assert torch.equal(summary[:, 0].long(), tokens)
                got = confidences_of(summary, config, measure, dtype)
                tolerance = 1e-5 if dtype == torch.float32 else 2**-7
                torch.testing.assert_close(got, confidences, rtol=tolerance, atol=tolerance)


CHECKS: Sequence[Callable[[GreedyKernel], None]] = (
    vocabularies_of_any_size,
    the_mask_token_anywhere,
    of_equals_the_lowest_id,
    infinities_and_what_is_no_number,
    confidences_next_to_one_stay_apart,
    rows_and_entries_with_any_stride,
    a_row_alone_and_among_others,
    any_few_logits,
    the_confidences_of_both_families_rules,
)
