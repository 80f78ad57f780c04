"""What is tried on so many GPUs: every split in its mode, and nothing twice."""

import math

import pytest
from tests.loadtest.recommend.builders import candidate

from sangam_core.errors import ConfigurationError
from sangam_loadtest.recommend.candidates import (
    Choices,
    Mode,
    mode_of,
    neighbours,
    splits_of,
)
from sangam_loadtest.simulator.system import Split


def test_eight_gpus_are_split_in_every_way() -> None:
    splits = splits_of(8)
    assert splits[0] == "8C"
    assert {s for s in splits if mode_of(s) is Mode.HYBRID} == {
        f"{n}P{8 - n}C" for n in range(1, 8)
    }
    assert {s for s in splits if mode_of(s) is Mode.DISAGGREGATED} == {
        f"{n}P{8 - n}D" for n in range(1, 8)
    }


def test_one_gpu_does_both() -> None:
    assert splits_of(1) == ("1C",)


@pytest.mark.parametrize("num_gpus", [2, 3, 5, 9, 16, 100])
def test_splits_use_every_gpu_and_are_not_many(num_gpus: int) -> None:
    splits = splits_of(num_gpus)
    assert len(set(splits)) == len(splits) <= 15
    assert {Split.parse(split).num_workers for split in splits} == {num_gpus}
    assert {mode_of(split) for split in splits} == set(Mode)


def test_no_gpus_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one GPU"):
        splits_of(0)


def test_between_neighbours_of_many_gpus_there_are_further_splits() -> None:
    tried = list(splits_of(64))
    assert neighbours("40P24C", tried) == ["36P28C", "44P20C"]
    tried += ["36P28C", "44P20C"]
    assert neighbours("40P24C", tried) == ["38P26C", "42P22C"]
    assert neighbours("5P3D", splits_of(8)) == []


def test_settings_without_effect_in_a_mode_are_tried_once() -> None:
    choices = Choices(("8C", "5P3D"), placements=("hybrid", "shortest_delay", "decode_aware"))
    colocated, static = list(choices.of_split("8C")), list(choices.of_split("5P3D"))
    assert {c.policy.placement for c in colocated} == {"hybrid", "decode_aware"}
    assert len(colocated) == 2 * len(choices.colocated_taus)
    assert {c.policy.placement for c in static} == {"hybrid"}
    assert len(static) == len(choices.prefill_taus)
    assert not any(c.policy.overflow for c in static)


def test_hybrids_are_tried_with_every_theta_and_placement() -> None:
    choices = Choices(("5P3C",), thetas=(4096.0, math.inf), hybrid_taus=(1024, 2048))
    found = list(choices.of_split("5P3C"))
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2
    assert all(c.policy.overflow for c in found)
    assert (found[0].policy.placement, found[0].policy.tau_prefill) == ("hybrid", 8192)


def test_splits_are_compared_with_the_defaults_of_the_other_settings() -> None:
    coarse = Choices(splits_of(8)).coarse()
    assert len(coarse) == 1 + 7 * 4 + 7 * 2
    assert {c.policy.tau for c in coarse} == {1024}
    assert {c.policy.theta for c in coarse} == {8192}


def test_a_fixed_setting_is_kept_where_the_default_is_not_among_the_choices() -> None:
    choices = Choices(("5P3C",), hybrid_taus=(777,), thetas=(1234.0,), placements=("hybrid",))
    assert {(c.policy.tau, c.policy.theta) for c in choices.coarse()} == {(777, 1234.0)}


def test_names_tell_what_means_something_in_the_mode() -> None:
    assert str(candidate("8C", tau=512)) == "8C (tau 512)"
    assert str(candidate("5P3D", tau_prefill=2048)) == "5P3D (prefill tau 2048)"
    hybrid = candidate("5P3C", placement="shortest_delay", theta=math.inf, admission="adaptive")
    assert str(hybrid) == (
        "5P3C (tau 1024, prefill tau 8192, theta inf, placement shortest_delay, admission adaptive)"
    )
