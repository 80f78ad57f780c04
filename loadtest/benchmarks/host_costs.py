"""What a real system adds to the costs of its passes: read from a first run's records.

Decides which constants explain what a run took beyond its simulation: the worker's time around
each pass and each row, the router's and the client's around each dispatch, and KV transfers.
``simulator_check`` runs and simulates.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sangam_loadtest.costs.constants import SystemConstants
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.simulator.worker import Iteration

_ROUNDS = 4
"""Longer passes meet more others, so one correction is not enough; later ones trade a tenth of
``row_seconds`` for ``pass_seconds`` and back."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulation: its records, and every iteration of its workers."""

    records: Sequence[RequestRecord]
    iterations: Sequence[Iteration]


def with_host_costs(
    constants: SystemConstants,
    measured: Sequence[RequestRecord],
    simulate: Callable[[SystemConstants], Simulated],
) -> SystemConstants:
    """The constants of a system whose simulation takes what a measured run took.

    ``request_seconds`` is what no part of a request's latency accounts for; transfers take their
    measured time, whatever their size; ``pass_seconds`` and ``row_seconds`` grow until simulated
    prefills and decodes both take as long on average as those of the run.

    Args:
        constants: as fitted to passes alone. simulate: simulates the measured run.
    """
    found = replace(
        constants,
        request_seconds=unaccounted_seconds(measured),
        transfer_fixed_seconds=transfer_seconds(measured),
    )
    seen = PassMeans.of(measured)
    for _ in range(_ROUNDS):
        simulated = simulate(found)
        missing = seen.minus(PassMeans.of(simulated.records))
        found = _corrected(found, missing, RowMeans.of(simulated.iterations))
    return found


@dataclass(frozen=True, slots=True)
class PassMeans:
    """Mean seconds of the iterations that blocks took part in.

    Attributes:
        prefill: of those with their prefill. decode: of the others.
    """

    prefill: float
    decode: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> "PassMeans":
        """The means over a run's answers."""
        counted = _counted(records)
        num_blocks = sum(r.num_blocks or 0 for r in counted)
        num_decodes = sum(r.num_steps or 0 for r in counted) - num_blocks
        return cls(
            sum(r.prefill_seconds or 0.0 for r in counted) / num_blocks,
            sum(r.decode_seconds or 0.0 for r in counted) / max(1, num_decodes),
        )

    def minus(self, other: "PassMeans") -> "PassMeans":
        """What the other lacks."""
        return PassMeans(self.prefill - other.prefill, self.decode - other.decode)


@dataclass(frozen=True, slots=True)
class RowMeans:
    """Mean packed rows of the same iterations."""

    prefill: float
    decode: float

    @classmethod
    def of(cls, iterations: Iterable[Iteration]) -> "RowMeans":
        """The means over a simulation's iterations, each as often as it has blocks."""
        rows, blocks = [0, 0], [0, 0]
        for batch in (iteration.batch for iteration in iterations):
            for index, count in enumerate((batch.num_prefills, batch.num_decodes)):
                rows[index] += count * batch.rows
                blocks[index] += count
        return cls(rows[0] / max(1, blocks[0]), rows[1] / max(1, blocks[1]))


def _corrected(constants: SystemConstants, missing: PassMeans, rows: RowMeans) -> SystemConstants:
    """Seconds a pass and a row that make up for what is missing, neither below 0 in all."""
    by_row = (missing.prefill - missing.decode) / max(1.0, rows.prefill - rows.decode)
    row_seconds = max(0.0, constants.row_seconds + by_row)
    by_row = row_seconds - constants.row_seconds
    pass_seconds = constants.pass_seconds + missing.decode - by_row * rows.decode
    return replace(constants, row_seconds=row_seconds, pass_seconds=max(0.0, pass_seconds))


def unaccounted_seconds(records: Sequence[RequestRecord]) -> float:
    """Mean seconds of a dispatch that no part of a latency accounts for: client, HTTP, router.

    A block that moves to a decode worker is dispatched twice.
    """
    counted = _counted(records)
    seconds = sum((r.latency_seconds or 0.0) - _accounted(r) for r in counted)
    return max(0.0, seconds) / max(1, sum(map(_num_dispatches, counted)))


def transfer_seconds(records: Sequence[RequestRecord]) -> float:
    """Mean seconds of a KV transfer; 0 where there was none."""
    counted = _counted(records)
    num_transfers = sum(_num_dispatches(r) - (r.num_blocks or 0) for r in counted)
    return sum(r.transfer_seconds or 0.0 for r in counted) / max(1, num_transfers)


def _num_dispatches(record: RequestRecord) -> int:
    return sum(map(len, record.placements))


def _accounted(record: RequestRecord) -> float:
    parts = (
        record.queueing_seconds,
        record.prefill_seconds,
        record.decode_seconds,
        record.transfer_seconds,
    )
    return sum(part or 0.0 for part in parts)


def _counted(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [r for r in records if r.error is None and not r.is_warmup]
