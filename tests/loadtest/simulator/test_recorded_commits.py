"""Commits of simulated blocks come from recorded ones of the same place in the answer."""

import random
from collections.abc import Sequence

import pytest

from sangam_core.errors import ConfigurationError
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.simulator.commits import RecordedCommits


def a_record(commit_counts: list[list[int]], error: str | None = None) -> RequestRecord:
    return RequestRecord(0, 0.0, 0.0, 10, 64, error=error, commit_counts=commit_counts)


def drawn(commits: RecordedCommits, block: int, num_masks: int = 32) -> set[tuple[int, ...]]:
    rng = random.Random(1)
    return {tuple(commits.draw(rng, num_masks, block)) for _ in range(100)}


def test_a_block_is_drawn_from_those_of_its_number_and_late_ones_from_the_last() -> None:
    records = [a_record([[8, 24], [32]]), a_record([[16, 16], [31, 1]])] * 20
    commits = RecordedCommits.of(records)
    assert drawn(commits, block=0) == {(8, 24), (16, 16)}
    assert drawn(commits, block=1) == drawn(commits, block=7) == {(32,), (31, 1)}
    assert commits.mean == 32 * 4 / 7


def test_a_number_with_few_blocks_shares_with_the_one_before() -> None:
    commits = RecordedCommits.of([a_record([[8, 24], [32]])])
    assert drawn(commits, block=0) == drawn(commits, block=1) == {(8, 24), (32,)}


@pytest.mark.parametrize(("recorded", "stretched"), [([4, 12], (8, 24)), ([1] * 64, (1,) * 32)])
def test_a_block_of_another_length_is_stretched_or_cut(
    recorded: list[int], stretched: Sequence[int]
) -> None:
    counts = RecordedCommits.of([a_record([recorded])]).draw(random.Random(0), 32, 0)
    assert sum(counts) == 32
    assert all(count > 0 for count in counts)
    if len(recorded) == 2:
        assert tuple(counts) == stretched


def test_passes_without_commits_and_failed_requests_do_not_count() -> None:
    records = [a_record([[0, 32, 0]]), a_record([[1] * 32], error="timeout")]
    assert drawn(RecordedCommits.of(records), block=0) == {(32,)}


@pytest.mark.parametrize("commit_counts", [[], [[]], [[0]]])
def test_records_that_tell_no_commits_are_refused(commit_counts: list[list[int]]) -> None:
    with pytest.raises(ConfigurationError, match="commit_counts"):
        RecordedCommits.of([a_record(commit_counts)])
