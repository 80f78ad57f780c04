"""What a pod's metadata says that an operator wants."""

import pytest
from tests.router.fleet_watch.fake_api_server import a_pod

from sangam_core.placement import Role
from sangam_router.fleet_watch.annotations import wish_of


def test_without_annotations_a_pod_is_wanted_as_it_boots() -> None:
    wish = wish_of(a_pod(version=7, boot_role="decode"))
    assert wish is not None
    assert (wish.worker_id, wish.name, wish.version) == ("u1", "sangam-u1", "7")
    assert (wish.role, wish.boot_role, wish.is_drained) == ("decode", Role.DECODE, False)
    assert wish.objection == ""


def test_annotations_name_another_role_and_a_drain() -> None:
    wish = wish_of(a_pod(annotations={"sangam.io/role": "colocated", "sangam.io/drain": "true"}))
    assert wish is not None
    assert (wish.role, wish.is_drained, wish.objection) == ("colocated", True, "")


@pytest.mark.parametrize(
    ("annotations", "objection"),
    [
        ({"sangam.io/role": "chef"}, "unknown_role"),
        ({"sangam.io/role": ""}, "unknown_role"),
        ({"sangam.io/role": "Prefill"}, "unknown_role"),
        ({"sangam.io/drain": "yes"}, "unknown_drain"),
    ],
)
def test_words_that_mean_nothing_are_objected_to(
    annotations: dict[str, str], objection: str
) -> None:
    wish = wish_of(a_pod(annotations=annotations))
    assert wish is not None
    assert wish.objection == objection


def test_a_pod_that_goes_away_wants_nothing() -> None:
    assert wish_of(a_pod(deletionTimestamp="2026-01-01T00:00:00Z")) is None


def test_a_pod_without_a_boot_role_is_no_worker() -> None:
    assert wish_of(a_pod(boot_role="router")) is None
    assert wish_of({"metadata": {"uid": "u", "name": "n"}}) is None
