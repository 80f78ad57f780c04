"""Strategies by name, held against what the core tells the router of them."""

from typing import get_args

import pytest

from sangam_core.decoding import CacheName
from sangam_core.geometry import Geometry
from sangam_core.rules import keeps_kv
from sangam_worker.strategies import STRATEGIES


def test_the_api_offers_exactly_the_strategies_that_workers_have() -> None:
    assert set(get_args(CacheName)) == set(STRATEGIES)


def test_the_core_knows_which_strategies_keep_kv() -> None:
    assert {name: keeps_kv(name) for name in STRATEGIES} == {
        name: strategy.keeps_kv for name, strategy in STRATEGIES.items()
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_rows_change_up_to_the_steady_step_and_not_behind_it(name: str) -> None:
    strategy, geometry = STRATEGIES[name], Geometry(20, 3, 8)
    rows = [strategy.rows(geometry, 1, step) for step in range(8)]
    first = next(step for step in range(8) if rows[step] == rows[-1])
    assert strategy.steady_step == first
    assert all(each == rows[-1] for each in rows[first:])
