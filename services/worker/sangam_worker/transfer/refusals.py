"""What a sender will not send, and how it says so. Called by ``exchange``, raised by ``peers``."""

from typing import Literal

from sangam_core.errors import TransferError
from sangam_worker.standing import Standing
from sangam_worker.transfer.pool import KVGeometry
from sangam_worker.transfer.wire import TransferRefusal, TransferRequest

Code = Literal["not_held", "wrong_epoch", "mismatch", "stale_channel", "busy"]


class TransferRefused(TransferError):
    """The sender said no (409 on its side)."""

    def __init__(self, refusal: TransferRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def refused(code: Code, message: str) -> TransferRefused:
    """A refusal to raise."""
    return TransferRefused(TransferRefusal(code=code, message=message))


def check_fits(
    request: TransferRequest, standing: Standing, geometry: KVGeometry, transport: str
) -> None:
    """``TransferRefused`` when the receiver asks another life, or could not take what is sent."""
    if request.sender_epoch != standing.epoch:
        message = f"{standing.worker_id} has epoch {standing.epoch}"
        raise refused("wrong_epoch", f"{message}, not {request.sender_epoch}")
    for name, ours, theirs in (
        ("model", standing.model, request.model),
        ("KV geometry", geometry, request.kv),
        ("transport", transport, request.transport),
    ):
        if ours != theirs:
            message = f"{name}: {ours} here, {theirs} at the receiver"
            if name == "transport":
                message += "; both need the same SANGAM_KV_TRANSPORT"
            raise refused("mismatch", message)
