"""Commit counts: whole blocks, no empty pass, the mean asked for, real blocks as they were."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sangam_core.errors import ConfigurationError
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.simulator.commits import DEFAULT_COMMITS, GeometricCommits, RecordedCommits

SEEDS = st.integers(0, 2**32)
BLOCKS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), min_size=1, max_size=6)


def a_record(*blocks: list[int], error: str | None = None) -> RequestRecord:
    made = RequestRecord(0, 0.0, 0.0, 10, 64, commit_counts=list(blocks))
    return replace(made, error=error)


def drawn(commits: GeometricCommits | RecordedCommits, num: int, block: int = 0) -> list[list[int]]:
    rng = random.Random(3)
    return [list(commits.draw(rng, 32, block)) for _ in range(num)]


@given(SEEDS, st.floats(1.0, 16.0), st.integers(1, 64))
def test_every_mask_is_committed_once_and_no_pass_is_empty(
    seed: int, mean: float, num_masks: int
) -> None:
    counts = GeometricCommits.calibrated(mean).draw(random.Random(seed), num_masks, 0)
    assert sum(counts) == num_masks
    assert min(counts) >= 1


@given(st.floats(1.0, 12.0))
def test_a_geometric_distribution_has_the_mean_that_was_asked_for(mean: float) -> None:
    blocks = drawn(GeometricCommits.calibrated(mean), 800)
    found = 32 * len(blocks) / sum(map(len, blocks))
    assert found == pytest.approx(mean, rel=0.08)


def test_blocks_of_another_length_have_their_mean_too() -> None:
    commits = GeometricCommits.calibrated(2.0, block_length=8)
    rng = random.Random(3)
    blocks = [commits.draw(rng, 8, 0) for _ in range(3000)]
    assert 8 * len(blocks) / sum(map(len, blocks)) == pytest.approx(2.0, rel=0.03)


def test_one_token_a_pass_is_exact() -> None:
    assert drawn(GeometricCommits.calibrated(1.0), 3) == [[1] * 32] * 3


@pytest.mark.parametrize("mean", [0.99, 0.0, -1.0, 16.1, float("nan")])
def test_a_mean_that_cannot_be_is_refused(mean: float) -> None:
    with pytest.raises(ConfigurationError, match=r"\[1, 16\]"):
        GeometricCommits.calibrated(mean)


def test_the_defaults_can_be_calibrated() -> None:
    for mean in DEFAULT_COMMITS.values():
        assert GeometricCommits.calibrated(mean).mean == mean


@given(SEEDS, BLOCKS, st.integers(1, 64), st.integers(0, 8))
def test_recorded_blocks_are_stretched_to_the_masks_at_hand(
    seed: int, blocks: list[list[int]], num_masks: int, block: int
) -> None:
    if not any(sum(counts) for counts in blocks):
        blocks = [[1]]
    counts = RecordedCommits.of([a_record(*blocks)]).draw(random.Random(seed), num_masks, block)
    assert sum(counts) == num_masks
    assert min(counts) >= 1


def test_whole_recorded_blocks_are_drawn_never_a_mixture() -> None:
    slow, fast = [2] * 16, [20, 12]
    commits = RecordedCommits.of([a_record(slow), a_record(fast)])
    assert {tuple(block) for block in drawn(commits, 40)} == {tuple(slow), tuple(fast)}
    assert commits.mean == 64 / 18


def test_a_stretched_block_keeps_its_shape() -> None:
    commits = RecordedCommits.of([a_record([4, 2, 2])])
    assert drawn(commits, 1) == [[16, 8, 8]]


def test_a_blocks_place_in_the_answer_decides_which_are_drawn() -> None:
    commits = RecordedCommits.of([a_record([1] * 32, [32], [16, 16]) for _ in range(20)])
    assert drawn(commits, 2, block=0) == [[1] * 32] * 2
    assert drawn(commits, 2, block=1) == [[32]] * 2
    for later in (2, 3, 99):
        assert drawn(commits, 2, block=later) == [[16, 16]] * 2


def test_a_number_with_few_blocks_is_put_together_with_the_one_before() -> None:
    commits = RecordedCommits.of([a_record([1] * 32)] * 40 + [a_record([1] * 32, [32])] * 19)
    assert {tuple(block) for block in drawn(commits, 200, block=1)} == {(1,) * 32, (32,)}
    assert drawn(commits, 200, block=0) == drawn(commits, 200, block=1)


@pytest.mark.parametrize(
    "records",
    [[], [a_record()], [a_record([0, 0])], [a_record([8, 8], error="timeout")]],
    ids=["none", "without commits", "empty passes", "failed"],
)
def test_records_that_tell_no_commits_are_refused(records: list[RequestRecord]) -> None:
    with pytest.raises(ConfigurationError, match="commit_counts"):
        RecordedCommits.of(records)
