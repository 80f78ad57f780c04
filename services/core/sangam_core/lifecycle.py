"""The phases of a request and the only function that changes them.

A transition table and ``advance(request, event) -> next command``. The router's driver and the
simulator feed it events; neither writes a phase itself. Where an event leaves a choice (another
placement, or the end) they go by the command; elsewhere it names the one step that can follow. It
does not say *where* anything runs (placement) nor *when* (scheduler).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from sangam_core.errors import IllegalTransition
from sangam_core.geometry import Geometry


class Phase(StrEnum):
    """Where a request stands. The last three are final."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing can happen to the request any more."""
        return self in FINAL_PHASES


FINAL_PHASES = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})


class Event(StrEnum):
    """What can happen to a request."""

    PREFILL_PLACED = "prefill_placed"
    """A worker's budget and pages were reserved for the current block's prefill."""
    PREFILLED_IN_PLACE = "prefilled_in_place"
    """The prefill has run on a worker that decodes the block as well."""
    PREFILLED_FOR_TRANSFER = "prefilled_for_transfer"
    """The prefill has run on a prefill worker; its KV waits there."""
    DECODE_PLACED = "decode_placed"
    """Pages of a decode-capable worker were reserved."""
    KV_ARRIVED = "kv_arrived"
    """Every layer has arrived at the decode worker."""
    PLACE_REFUSED = "place_refused"
    """The worker's own allocator refused; the reservation is given back."""
    BLOCK_COMPLETE = "block_complete"
    """No mask is left in the block."""
    ANSWER_COMPLETE = "answer_complete"
    """EOS with no mask before it, or a stop string: later blocks never run."""
    BLOCK_LOST = "block_lost"
    """A worker died, drained, or a transfer expired: the block starts again elsewhere."""
    CANCEL = "cancel"
    """The client went away."""
    GIVE_UP = "give_up"
    """The deadline, the retries or the whole fleet is gone."""


class Command(StrEnum):
    """What comes next for the request; the last three end it."""

    PLACE_PREFILL = "place_prefill"
    START_PREFILL = "start_prefill"
    PLACE_DECODE = "place_decode"
    START_TRANSFER = "start_transfer"
    FOLLOW_DECODE = "follow_decode"
    FINISH = "finish"
    FAIL = "fail"
    DISCARD = "discard"


_RUNNING: dict[tuple[Phase, Event], tuple[Phase, Command]] = {
    (Phase.WAITING, Event.PREFILL_PLACED): (Phase.PREFILLING, Command.START_PREFILL),
    (Phase.PREFILLING, Event.PREFILLED_IN_PLACE): (Phase.DECODING, Command.FOLLOW_DECODE),
    (Phase.PREFILLING, Event.PREFILLED_FOR_TRANSFER): (Phase.PREFILLED, Command.PLACE_DECODE),
    (Phase.PREFILLING, Event.PLACE_REFUSED): (Phase.WAITING, Command.PLACE_PREFILL),
    (Phase.PREFILLED, Event.DECODE_PLACED): (Phase.TRANSFERRING, Command.START_TRANSFER),
    (Phase.TRANSFERRING, Event.KV_ARRIVED): (Phase.DECODING, Command.FOLLOW_DECODE),
    (Phase.TRANSFERRING, Event.PLACE_REFUSED): (Phase.PREFILLED, Command.PLACE_DECODE),
}
_HOLDS_A_PLACE = (Phase.PREFILLING, Phase.PREFILLED, Phase.TRANSFERRING, Phase.DECODING)
_RUNS_PASSES = (Phase.PREFILLING, Phase.DECODING)


def _table() -> dict[tuple[Phase, Event], tuple[Phase, Command]]:
    table = dict(_RUNNING)
    for phase in _HOLDS_A_PLACE:
        table[phase, Event.BLOCK_LOST] = (Phase.WAITING, Command.PLACE_PREFILL)
    for phase in _RUNS_PASSES:
        table[phase, Event.BLOCK_COMPLETE] = (Phase.WAITING, Command.PLACE_PREFILL)
        table[phase, Event.ANSWER_COMPLETE] = (Phase.FINISHED, Command.FINISH)
    for phase in Phase:
        if not phase.is_final:
            table[phase, Event.CANCEL] = (Phase.CANCELLED, Command.DISCARD)
            table[phase, Event.GIVE_UP] = (Phase.FAILED, Command.FAIL)
    return table


TRANSITIONS = _table()
"""(phase, event) -> (next phase, command). Everything absent is illegal."""


@dataclass(slots=True)
class Request:
    """One request on its way through the system.

    Attributes:
        arrival_seconds: position in every queue (ties: ``request_id``), the same for every block.
        block: the block being generated.
        attempt: counts placements of the current block; names them uniquely.
        num_lost: how often a block had to start again elsewhere, over the request's life.
    """

    request_id: str
    arrival_seconds: float
    geometry: Geometry
    block: int = 0
    attempt: int = 0
    num_lost: int = 0
    _phase: Phase = field(default=Phase.WAITING, init=False)

    @property
    def phase(self) -> Phase:
        """The current phase; only ``advance`` changes it."""
        return self._phase

    @property
    def order(self) -> tuple[float, str]:
        """Sort key of every queue: arrival, then id."""
        return (self.arrival_seconds, self.request_id)


def advance(request: Request, event: Event) -> Command:
    """Move a request on and say what to do next.

    Raises:
        IllegalTransition: the event cannot happen in the request's phase (a bug of the caller).
    """
    try:
        phase, command = TRANSITIONS[request.phase, event]
    except KeyError:
        raise IllegalTransition(
            f"request {request.request_id}: {event} cannot happen while {request.phase}"
        ) from None
    if event is Event.PREFILL_PLACED:
        request.attempt += 1
    elif event is Event.BLOCK_LOST:
        request.num_lost += 1
    elif event is Event.BLOCK_COMPLETE:
        if request.block + 1 == request.geometry.num_blocks:
            phase, command = Phase.FINISHED, Command.FINISH
        else:
            request.block += 1
            request.attempt = 0
    request._phase = phase
    return command
