"""Role options of ``sangam up``: defaults, and mixes that could not serve."""

import pytest

from sangam_core.errors import ConfigurationError
from sangam_core.placement import Role
from sangam_router.local.roles import RoleCounts, resolve_roles


def test_without_options_two_workers_do_both() -> None:
    assert resolve_roles(None, None, None) == RoleCounts(colocated=2)


def test_prefill_and_decode_need_no_colocated_worker() -> None:
    assert resolve_roles(2, 1, None) == RoleCounts(prefill=2, decode=1)


def test_prefill_with_colocated_is_the_hybrid_mode() -> None:
    counts = resolve_roles(2, None, 1)
    assert counts.roles() == [Role.PREFILL, Role.PREFILL, Role.COLOCATED]
    assert str(counts) == "2 prefill, 1 colocated"


@pytest.mark.parametrize(
    ("prefill", "decode", "colocated", "advice"),
    [
        (2, None, None, "add --decode N or --colocated N"),
        (1, 0, 0, "add --decode N or --colocated N"),
        (None, 1, None, "add --prefill N"),
        (None, 1, 2, "add --prefill N"),
        (0, None, None, "no worker at all"),
        (None, None, 0, "no worker at all"),
    ],
)
def test_a_mix_that_could_not_serve_is_refused_with_what_to_add(
    prefill: int | None, decode: int | None, colocated: int | None, advice: str
) -> None:
    with pytest.raises(ConfigurationError, match=advice):
        resolve_roles(prefill, decode, colocated)
