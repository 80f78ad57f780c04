"""How a worker's lease lies in Redis: key names and fields, shared by both sides.

The worker renews its lease as one hash with an expiry; routers read it in their scripts. Every
key carries one hash tag, so that Redis Cluster keeps them in one slot, and the ledger's version,
so that old and new routers run side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from sangam_core.decoding import WireModel
from sangam_core.errors import ConfigurationError
from sangam_core.placement import Role
from sangam_core.wire import PROTOCOL_VERSION

LEDGER_VERSION = 1


class LedgerKeys:
    """Key names under one namespace (several deployments may share a Redis).

    Raises:
        ConfigurationError: the namespace holds a brace, which would change the hash tag.
    """

    def __init__(self, namespace: str = "sangam") -> None:
        if not namespace or "{" in namespace or "}" in namespace:
            raise ConfigurationError(
                f"redis namespace {namespace!r}: must be non-empty and without braces"
            )
        self.prefix = f"{{{namespace}}}:v{LEDGER_VERSION}:"

    @property
    def workers(self) -> str:
        """Set of the ids of all workers that hold, or lately held, a lease.

        A worker adds itself with every heartbeat; routers take out those without a lease.
        """
        return self.prefix + "workers"

    def worker(self, worker_id: str) -> str:
        """Hash with expiry: a worker's lease (``WorkerLease`` fields)."""
        return f"{self.prefix}worker:{worker_id}"

    def desired(self, worker_id: str) -> str:
        """Hash: what an operator wants of the worker (``DesiredState`` fields, and ``version``).

        A field, or the key, that is missing means that the worker keeps what it has.
        """
        return f"{self.prefix}desired:{worker_id}"

    def refused(self, worker_id: str) -> str:
        """Hash: a wish that was not granted (as in ``desired``), and why: ``reason``."""
        return f"{self.prefix}refused:{worker_id}"

    @property
    def wake_channel(self) -> str:
        """Pub/sub channel: something came free or the fleet changed; waiters look again.

        A worker publishes its id here when its lease is new, drains or changes its role.
        """
        return self.prefix + "wake"


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What an operator wants of a worker, as the worker reads it at every heartbeat.

    Attributes:
        role: text, since an unknown one must be refused and shown. None: keep the role.
        is_drained: whether it takes new blocks. None: keep.
    """

    role: str | None = None
    is_drained: bool | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> "DesiredState":
        """Read it back; what is missing means keep."""
        is_drained = fields.get("is_drained")
        return cls(
            role=fields.get("role") or None,
            is_drained=None if is_drained not in ("0", "1") else is_drained == "1",
        )


class WorkerLease(WireModel):
    """What a worker publishes of itself with every heartbeat.

    Attributes:
        name: what people call it (a pod's name); empty: the id. node: the machine it runs on.
        epoch: random per process start and role switch, never counted.
        role: the effective role. boot_role: the one it started with.
        url: base of its internal API, e.g. ``http://10.0.0.7:21034``.
        total_pages: its KV pool; free_pages: as its own allocator counts them.
        model: what it serves; routers give it work only for the same model.
        quantization: in which numbers it multiplies; routers show it, and say where a fleet mixes.
        kv_format: number format of its KV and how it moves, e.g. ``bfloat16 by nccl``; blocks are
            handed over only between equal ones. Empty: a version that does not tell.
        max_sequence_tokens: its limit on prompt + L: the model's, or a shorter one of its own.
        carried_tokens: the scheduler's deficit S, as of the heartbeat.
    """

    worker_id: str
    epoch: str
    role: Role
    boot_role: Role
    url: str
    model: str
    protocol: int = PROTOCOL_VERSION
    version: str = ""
    name: str = ""
    node: str = ""
    quantization: str = "none"
    kv_format: str = ""
    is_draining: bool = False
    total_pages: int
    free_pages: int
    page_tokens: int
    block_length: int
    max_sequence_tokens: int
    num_waiting: int = 0
    num_running: int = 0
    carried_tokens: int = 0
    tau_tokens: int = 0

    def fields(self) -> dict[str, str]:
        """The lease as the fields of a Redis hash (booleans as 0 and 1)."""
        return {
            name: str(int(value)) if isinstance(value, bool) else str(value)
            for name, value in self.model_dump(mode="json").items()
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> "WorkerLease | None":
        """Read a lease back; unknown fields (a newer worker's) are dropped, a torn one is None."""
        try:
            return cls.model_validate(cls._known(fields))
        except ValidationError:
            return None

    @classmethod
    def unreadable_fields(cls, fields: Mapping[str, str]) -> tuple[str, ...]:
        """Which fields keep a lease from being read: missing, or not as they have to be; sorted."""
        try:
            cls.model_validate(cls._known(fields))
        except ValidationError as error:
            return tuple(sorted({str(each["loc"][0]) for each in error.errors()}))
        return ()

    @classmethod
    def _known(cls, fields: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in fields.items() if name in cls.model_fields}
