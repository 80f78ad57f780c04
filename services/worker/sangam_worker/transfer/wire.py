"""What two workers say to each other about transfers (``POST /internal/v1/transfers``).

The receiver asks, once its pages are reserved; the sender says yes and begins, or says why not.
Whoever closes its end of a pair tells the other (``POST /internal/v1/transfers/closed``), which
answers when its end is closed.
"""

from typing import Annotated, Literal

from pydantic import Field

from sangam_core.decoding import WireModel
from sangam_core.wire import PROTOCOL_VERSION, BlockKey
from sangam_worker.transfer.pool import KVGeometry


class TransferRequest(WireModel):
    """Asks a sender for a held block's KV.

    Attributes:
        sender_epoch: the life of the sender that holds the block.
        receiver_id, receiver_epoch: who asks; with ``sender_epoch`` they name the pair.
        num_pages: pages that the receiver has reserved.
        communicator: names the pair's channel.
        offer: the transport's, for a channel that is to be made; ``None`` for one that the
            receiver believes connected.
        timeout_seconds: from now until the last byte.
    """

    protocol: int = PROTOCOL_VERSION
    key: BlockKey
    sender_epoch: str
    receiver_id: str
    receiver_epoch: str
    model: str
    kv: KVGeometry
    transport: str
    num_pages: Annotated[int, Field(ge=1)]
    communicator: Annotated[str, Field(min_length=1, max_length=100)]
    offer: str | None
    timeout_seconds: Annotated[float, Field(gt=0)]


class TransferAccepted(WireModel):
    """The sender has begun."""

    sender_id: str
    sender_epoch: str


class TransferRefusal(WireModel):
    """The sender will not send.

    ``not_held``: no such block waits here (cancelled, or being sent already). ``wrong_epoch``:
    it was held by an earlier life. ``mismatch``: model, KV geometry, transport or page count
    differ. ``stale_channel``: the channel is not connected here; ask again with an offer.
    ``busy``: others were being sent until the deadline.
    """

    code: Literal["not_held", "wrong_epoch", "mismatch", "stale_channel", "busy"]
    message: str


class PairClosed(WireModel):
    """One end of a pair goes, so that the other is of no use.

    Attributes:
        communicator: of the pair; who does not know it has nothing to do.
        is_failure: a transfer failed: the other end is to be ended even in use.
    """

    protocol: int = PROTOCOL_VERSION
    communicator: Annotated[str, Field(min_length=1, max_length=100)]
    is_failure: bool
