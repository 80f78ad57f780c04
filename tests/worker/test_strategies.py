"""Strategies by name, held against what the core tells the router of them."""

from typing import get_args

from sangam_core.decoding import CacheName
from sangam_core.rules import keeps_kv
from sangam_worker.strategies import STRATEGIES


def test_the_api_offers_exactly_the_strategies_that_workers_have() -> None:
    assert set(get_args(CacheName)) == set(STRATEGIES)


def test_the_core_knows_which_strategies_keep_kv() -> None:
    assert {name: keeps_kv(name) for name in STRATEGIES} == {
        name: strategy.keeps_kv for name, strategy in STRATEGIES.items()
    }
