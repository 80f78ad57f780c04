"""What router and workers say to each other: bodies and events of the internal HTTP API.

Decides names and shapes, nothing else. ``POST /internal/v1/blocks`` takes a ``BlockStart`` and
answers with one JSON event a line (``BlockEvent``) until the block is done with on that worker.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from sangam_core.answer import Completion
from sangam_core.decoding import Commit, Decoding, Resume, WireModel
from sangam_core.geometry import Geometry
from sangam_core.placement import Role

PROTOCOL_VERSION = 2
"""Spoken by this version; a router gives work only to workers that speak it."""

TOKEN_HEADER = "x-sangam-token"
"""Header that carries the token shared by routers and workers."""


class BlockKey(WireModel):
    """Names one placement of one block; unique over the fleet."""

    request_id: str
    block: Annotated[int, Field(ge=0)]
    attempt: Annotated[int, Field(ge=0)] = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.block}/{self.attempt}"

    def __hash__(self) -> int:
        # Schedulers look blocks up several times a pass; pydantic's hash takes a microsecond.
        return hash((self.request_id, self.block, self.attempt))


class WireGeometry(WireModel):
    """``Geometry`` on the wire."""

    prompt_tokens: Annotated[int, Field(ge=0)]
    num_blocks: Annotated[int, Field(ge=1)]
    block_length: Annotated[int, Field(ge=1)]

    @classmethod
    def of(cls, geometry: Geometry) -> "WireGeometry":
        """The wire form of a geometry."""
        return cls(
            prompt_tokens=geometry.prompt_tokens,
            num_blocks=geometry.num_blocks,
            block_length=geometry.block_length,
        )

    def geometry(self) -> Geometry:
        """The geometry of a wire form."""
        return Geometry(self.prompt_tokens, self.num_blocks, self.block_length)


class KVSource(WireModel):
    """The worker that holds a prefilled block's KV."""

    worker_id: str
    epoch: str
    url: str


class BlockStart(WireModel):
    """One block's work for one worker.

    Attributes:
        worker_epoch: the epoch that the placement was made for; another one is refused (409).
        arrival_seconds: the request's arrival, its order in every queue.
        ids: the whole sequence, prompt + L. Without ``source``: as at the block's start (the
            block all masks). With ``source``: as of now, pass 0's commits included.
        hands_over: prefill only, then keep the KV until a decode worker fetches it.
        source: decode only, after fetching the KV there. Excludes ``hands_over``.
        step: number of the next pass that counts: 0 for a fresh block, 1 after a prefill on
            ``source``.
        resume: where a lost block goes on. The prefill is run again from ``ids``, its commits
            are ignored, ``resume.commits`` are laid over it. With ``source`` the ids hold the
            commits already and only step, masks and carry count.
        deadline_seconds: from now; the worker drops the block then.
    """

    protocol: int = PROTOCOL_VERSION
    key: BlockKey
    worker_epoch: str
    arrival_seconds: float
    ids: tuple[int, ...]
    geometry: WireGeometry
    decoding: Decoding
    hands_over: bool = False
    source: KVSource | None = None
    resume: Resume | None = None
    deadline_seconds: Annotated[float, Field(gt=0)] = 600.0


class Queued(WireModel):
    """The worker has taken the block (a decode: its pages are reserved)."""

    type: Literal["queued"] = "queued"


class Prefilled(WireModel):
    """The prefill's iteration has run: its load is off the worker.

    Always the event before that iteration's ``PassRan``; after a restart there is none (the
    commits of a repeated prefill are ignored).
    """

    type: Literal["prefilled"] = "prefilled"
    queue_seconds: float
    prefill_seconds: float


class PassRan(WireModel):
    """A pass that counts: its number, what it committed, what that completed, how long it took.

    Attributes:
        carry: the unmasking rule's state after it (see ``Resume``).
        queue_seconds: first pass of a block that moved here: waiting for its pages to be reserved
            and, its KV here, for the pass's iteration to begin.
        decode_seconds: until this pass's end, since the end of the block's last one here (a block
            that moved here: at first since its iteration began). 0 for a prefill, which
            ``Prefilled`` tells of.
    """

    type: Literal["pass"] = "pass"
    step: int
    commits: tuple[Commit, ...]
    carry: float = 0.0
    completion: Completion = Completion.NOTHING
    queue_seconds: float = 0.0
    decode_seconds: float = 0.0


class KVArrived(WireModel):
    """Every layer's KV is here (at the receiver)."""

    type: Literal["kv_arrived"] = "kv_arrived"
    transfer_seconds: float
    num_bytes: int


class KVSent(WireModel):
    """The transfer has ended and the sender's pages are free (at the sender)."""

    type: Literal["kv_sent"] = "kv_sent"


class Completed(WireModel):
    """Last event of a block that was completed here; its pages are free."""

    type: Literal["completed"] = "completed"
    num_passes: int


class LossReason(WireModel):
    """Why a block did not complete here, as a code and in words."""

    code: Literal[
        "draining", "role_changed", "transfer_failed", "deadline", "cancelled", "engine_error"
    ]
    message: str


class Lost(WireModel):
    """Last event of a block that will not complete here; its pages are free."""

    type: Literal["lost"] = "lost"
    reason: LossReason


class Ping(WireModel):
    """Nothing happened for a while; the connection is alive."""

    type: Literal["ping"] = "ping"


BlockEvent = Annotated[
    Queued | Prefilled | PassRan | KVArrived | KVSent | Completed | Lost | Ping,
    Field(discriminator="type"),
]
BLOCK_EVENT: TypeAdapter[BlockEvent] = TypeAdapter(BlockEvent)
"""Parses one line of the event stream."""


class Refusal(WireModel):
    """Body of a 409: the block was not taken, and nothing is held for it.

    ``no_pages``: the worker's own allocator has too few (place again); ``never_fits``: its whole
    pool has, or it takes no sequence of that length (place elsewhere);
    ``wrong_epoch``/``wrong_role``/``draining``: the fleet view was stale; ``duplicate``: the key
    is running here.
    """

    code: Literal["no_pages", "never_fits", "wrong_epoch", "wrong_role", "draining", "duplicate"]
    message: str


class RoleChange(WireModel):
    """Body of ``POST /internal/v1/role``."""

    role: Role


class HeldBlock(WireModel):
    """One block on a worker.

    Attributes:
        stage: ``waiting``, ``admitted``, ``decoding``, ``holding``, ``arriving`` or ``parked``.
        num_pages: what it holds now; needed_pages: what it holds once it runs.
        prefill_tokens: what its prefill still costs; 0 when that has run (or runs elsewhere).
    """

    key: BlockKey
    stage: str
    num_pages: int
    needed_pages: int
    prefill_tokens: int


class HeldBlocks(WireModel):
    """Answer of ``GET /internal/v1/blocks``: what a worker holds, for people and tests."""

    worker_id: str
    epoch: str
    role: Role
    is_draining: bool
    total_pages: int
    free_pages: int
    blocks: tuple[HeldBlock, ...]
