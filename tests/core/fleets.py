"""Fleets, demands and policies for tests of placements: builders, and strategies that draw them."""

import math
from typing import Any

from hypothesis import strategies as st

from sangam_core.placement import Demand, FleetLoad, PlacementPolicy, Role, WorkerLoad
from sangam_core.placements import PLACEMENTS

HYBRID = PlacementPolicy(theta_tokens=1000)
STATIC = PlacementPolicy(is_overflow_allowed=False)


def worker(
    worker_id: str,
    role: Role,
    *,
    load_tokens: int = 0,
    free_pages: int = 100,
    total_pages: int = 100,
    is_draining: bool = False,
    max_sequence_tokens: float = math.inf,
    kv_format: str = "",
) -> WorkerLoad:
    return WorkerLoad(
        worker_id,
        f"epoch-of-{worker_id}",
        role,
        load_tokens,
        free_pages,
        total_pages,
        is_draining,
        max_sequence_tokens=max_sequence_tokens,
        kv_format=kv_format,
    )


def prefill(worker_id: str = "p", **loads: Any) -> WorkerLoad:
    return worker(worker_id, Role.PREFILL, **loads)


def decode(worker_id: str = "d", **loads: Any) -> WorkerLoad:
    return worker(worker_id, Role.DECODE, **loads)


def colocated(worker_id: str = "c", **loads: Any) -> WorkerLoad:
    return worker(worker_id, Role.COLOCATED, **loads)


def fleet(*workers: WorkerLoad, pending_decode_pages: int = 0) -> FleetLoad:
    return FleetLoad(workers, pending_decode_pages)


def demand(num_pages: int = 10, *, request_id: str = "r", needs_colocated: bool = False) -> Demand:
    return Demand(request_id, num_pages * 16, num_pages, needs_colocated)


def id_of(chosen: WorkerLoad | None) -> str | None:
    return None if chosen is None else chosen.worker_id


def _random_worker(
    number: int,
    role: Role,
    load_tokens: int,
    free_pages: int,
    used_pages: int,
    is_draining: bool,
    max_sequence_tokens: float,
    kv_format: str,
) -> WorkerLoad:
    return worker(
        f"w{number}",
        role,
        load_tokens=load_tokens,
        free_pages=free_pages,
        total_pages=free_pages + used_pages,
        is_draining=is_draining,
        max_sequence_tokens=max_sequence_tokens,
        kv_format=kv_format,
    )


def _fleets(*kv_formats: str) -> st.SearchStrategy[FleetLoad]:
    workers = st.lists(
        st.builds(
            _random_worker,
            number=st.integers(0, 8),
            role=st.sampled_from(Role),
            load_tokens=st.integers(0, 8).map(lambda tens: tens * 10),
            free_pages=st.integers(0, 12),
            used_pages=st.integers(0, 3),
            is_draining=st.booleans(),
            max_sequence_tokens=st.sampled_from([60, 99, 100, 4096, math.inf]),
            kv_format=st.sampled_from(kv_formats),
        ),
        max_size=6,
        unique_by=lambda w: w.worker_id,
    )
    return st.builds(
        lambda workers, pending: FleetLoad(tuple(workers), pending), workers, st.integers(0, 6)
    )


FLEETS = _fleets("")
MIXED_FLEETS = _fleets("", "float32", "bfloat16")
"""Whose workers differ in their KV as well."""
DEMANDS = st.builds(
    Demand,
    request_id=st.sampled_from(["r1", "r2", "r3"]),
    cost_tokens=st.sampled_from([60, 100]),
    num_pages=st.integers(1, 8),
)
POLICIES = st.builds(
    PlacementPolicy,
    name=st.sampled_from(sorted(PLACEMENTS)),
    theta_tokens=st.sampled_from([10, 30, 50, math.inf]),
    is_overflow_allowed=st.booleans(),
)


def takes(candidate: WorkerLoad, block: Demand) -> bool:
    """Whether it is there, and takes a sequence of that length."""
    return not candidate.is_draining and candidate.max_sequence_tokens >= block.cost_tokens
