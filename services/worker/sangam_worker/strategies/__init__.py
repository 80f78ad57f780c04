"""Caching strategies by name: each is one module that says which rows a pass feeds.

A new one (dKV-Cache, block-causal models) is a module here and a line in ``STRATEGIES``.
"""

from sangam_core.errors import InvalidRequest
from sangam_worker.strategies import dual, none, prefix
from sangam_worker.strategies.protocol import CachingStrategy, Rows

STRATEGIES: dict[str, CachingStrategy] = {
    strategy.name: strategy for strategy in (dual.DualCache(), prefix.PrefixCache(), none.NoCache())
}

__all__ = ["STRATEGIES", "CachingStrategy", "Rows", "strategy_named"]


def strategy_named(name: str) -> CachingStrategy:
    """The strategy of a name. ``InvalidRequest`` (param ``cache``) when there is none."""
    try:
        return STRATEGIES[name]
    except KeyError:
        known = ", ".join(sorted(STRATEGIES))
        raise InvalidRequest(
            f"cache {name!r} is unknown; use one of {known}", param="cache"
        ) from None
