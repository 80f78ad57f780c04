"""Splits in the paper's notation, and errors that name the option that is wrong."""

import math
from typing import Any

import pytest
from tests.loadtest.simulator.builders import a_system

from sangam_core.errors import ConfigurationError
from sangam_core.placement import Role
from sangam_loadtest.simulator.system import DEFAULT_TAU_TOKENS, Split, System, max_batch_blocks
from sangam_worker.settings import WorkerSettings


@pytest.mark.parametrize(
    ("text", "counts", "shown"),
    [
        ("8C", {Role.COLOCATED: 8}, "8C"),
        ("4P4D", {Role.PREFILL: 4, Role.DECODE: 4}, "4P4D"),
        (" 5p3c ", {Role.PREFILL: 5, Role.COLOCATED: 3}, "5P3C"),
        ("3C5P", {Role.PREFILL: 5, Role.COLOCATED: 3}, "5P3C"),
        ("2D1P1C2D", {Role.DECODE: 4, Role.PREFILL: 1, Role.COLOCATED: 1}, "1P1C4D"),
        ("0P8C", {Role.COLOCATED: 8}, "8C"),
        ("640P384C", {Role.PREFILL: 640, Role.COLOCATED: 384}, "640P384C"),
    ],
)
def test_a_split_is_read_as_it_is_written(text: str, counts: dict[Role, int], shown: str) -> None:
    split = Split.parse(text)
    assert (dict(split.counts), str(split)) == (counts, shown)
    assert split.num_workers == len(split.roles()) == sum(counts.values())
    assert {role: split.roles().count(role) for role in counts} == counts


@pytest.mark.parametrize("text", ["", "8", "C", "8X", "5P,3C", "-1C", "1.5C", "8C!"])
def test_what_is_no_split_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigurationError, match="8C, 4P4D or 5P3C") as refused:
        Split.parse(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("4D", "prefill"), ("4P", "decode"), ("0P0C3D", "prefill")],
)
def test_a_split_that_could_not_serve_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no worker could {problem}"):
        Split.parse(text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"total_pages": 0}, "pages"),
        ({"tau": 0}, "tau"),
        ({"theta_tokens": 0.0}, "theta"),
        ({"theta_tokens": -1.0}, "theta"),
        ({"placement": "best"}, "placement 'best': use one of hybrid"),
        ({"admission": "all"}, "admission 'all': use one of deficit"),
        ({"mask_buffer_tokens": 100}, r"L \(100\)"),
        ({"max_batch_blocks": 0}, "a batch needs a block, not 0"),
        ({"mask_buffer_tokens": 0}, r"L \(0\)"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        a_system(**changes)


def test_overflow_and_theta_reach_the_policy() -> None:
    policy = a_system("1P1C", theta_tokens=77.0, is_overflow_allowed=False).placement_policy
    assert (policy.theta_tokens, policy.is_overflow_allowed) == (77.0, False)
    assert a_system().placement_policy.theta_tokens == math.inf


def test_defaults_are_the_workers_own() -> None:
    fields = WorkerSettings.model_fields
    for role in Role:
        assert DEFAULT_TAU_TOKENS[role] == fields[f"tau_tokens_{role}"].default
    share = fields["transferred_decode_share"].default
    assert System(Split.parse("8C"), 100).transferred_decode_share == share
    assert max_batch_blocks("sangam") == fields["max_batch_blocks"].default


def test_the_papers_batches_end_where_pages_do() -> None:
    assert max_batch_blocks("paper") == System(Split.parse("8C"), 100).max_batch_blocks


def test_a_split_without_a_worker_is_refused_by_what_was_written() -> None:
    with pytest.raises(ConfigurationError, match="split '0C': it has no worker"):
        Split.parse("0C")
