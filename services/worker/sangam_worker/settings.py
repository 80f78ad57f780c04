"""The worker's settings: one frozen tree, read once by ``__main__``.

Every field says what it means, its unit and why the default is what it is. Decides nothing at
run time; a bad value stops the start with one line that names the variable.
"""

import re
import secrets
import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from sangam_core.admission import ADMISSION_POLICIES, DEFICIT
from sangam_core.geometry import DEFAULT_BLOCK_LENGTH
from sangam_core.placement import Role
from sangam_core.settings import ServiceSettings
from sangam_worker.transfer.memory import TRANSFERS_EACH_WAY

DEFAULT_TOTAL_PAGES = 2048
"""32,768 tokens of KV: dozens of chat-sized requests, and a few MB for the small model."""

_WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})

_DEVICE = r"^(cpu|cuda(:\d{1,4})?)$"

_PORT_RANGE = r"^\d{1,5}-\d{1,5}$"


def _default_worker_id() -> str:
    return f"{socket.gethostname()}-{secrets.token_hex(3)}"


class WorkerSettings(ServiceSettings):
    """What one worker process is told through ``SANGAM_`` variables."""

    role: Role = Role.COLOCATED
    """What the worker admits at its start: ``prefill``, ``decode`` or ``colocated``. It can be
    changed at run time."""

    model: Annotated[str, Field(min_length=1)] = "small"
    """The checkpoint: a local folder, a Hugging Face id, ``small`` (shipped with Sangam), or
    ``random:llada-8b``, ``random:dream-7b``: random weights of that shape, for benchmarks."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of weights and KV. ``float32`` on CPU gives the same bytes everywhere;
    ``bfloat16`` is what GPUs are for. ``auto``: the one or the other, by device."""

    device: Annotated[str, Field(pattern=_DEVICE)] = "cpu"
    """Torch device of the engine: ``cpu``, or ``cuda:0`` and so on for an NVIDIA GPU."""

    attention: Literal["auto", "torch", "flashinfer", "flashinfer-fa2", "flashinfer-fa3"] = "auto"
    """What computes attention and, with it, norms, gates and rotations: ``torch`` (any device) or
    ``flashinfer`` (a CUDA device, bfloat16), which takes the faster of its kernels FA2 and FA3, and
    in graphs a kernel of our own where that is faster; ``flashinfer-fa2`` and ``flashinfer-fa3``
    take that one everywhere. ``auto``: FlashInfer on CUDA, torch elsewhere."""

    quantization: Literal["none", "fp8"] = "none"
    """``fp8``: the layers' products in 8 bits (e4m3, one scale a row), for GPUs from Ada and Hopper
    on: faster passes and two fifths less memory for weights, for answers that differ (README, FP8).
    A CPU computes the same rounding, and gains nothing. Workers of a fleet may differ in it."""

    cuda_graphs: bool = True
    """Whether iterations of decodes alone are replayed as CUDA graphs, captured at the start: one
    call to the driver instead of one a kernel. Off to look for a bug. Unused with ``torch``."""

    measure_kernels: bool = True
    """Whether each CUDA graph gets what is measured to be fastest on this GPU, at the start: the
    kernel of attention, and cuBLASLt's algorithm for each product in bfloat16. That takes seconds,
    and may turn out differently, so that answers differ in their rounding from start to start. Off:
    what was fastest on an H200, and cuBLAS' own choice. Unused without graphs."""

    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of the GPU's memory that the worker settles at its start, whatever is in use already
    included; the rest stays free for what nobody counts. The name is vLLM's."""

    total_pages: Annotated[int, Field(ge=1)] | None = None
    """KV pool, in pages of 16 tokens. Default: 2048 on a CPU; on a GPU what weights, graphs and
    activations leave of its share. Excludes ``pool_bytes``."""

    pool_bytes: Annotated[int, Field(ge=1)] | None = None
    """KV pool, in bytes, cut down to whole pages. Excludes ``total_pages``."""

    max_sequence_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest sequence (prompt and mask buffer) that the worker takes, in tokens, where the model
    allows more: the longest one's pass decides how much memory activations need. Workers of a fleet
    may differ in it: each gets the blocks that it takes."""

    max_batch_blocks: Annotated[int, Field(ge=1)] = 256
    """Most blocks in one iteration. It bounds the memory that an iteration needs; a batch as large
    has gained all that batching gives."""

    tau_tokens_prefill: Annotated[int, Field(ge=1)] = 8192
    """Token budget of an iteration while the role is ``prefill``. Large: no decode waits behind
    its prefills, so it may batch them (the paper gives prefill workers more)."""

    tau_tokens_decode: Annotated[int, Field(ge=1)] = 1024
    """Token budget of an iteration while the role is ``decode``; it bounds only what transferred
    decodes may take at once."""

    tau_tokens_colocated: Annotated[int, Field(ge=1)] = 1024
    """Token budget of an iteration while the role is ``colocated``: a prefill may stretch a
    decode's pass by about this many rows."""

    admission: str = DEFICIT
    """Which tau an iteration gets: ``deficit`` (always the role's, Algorithm 1) or ``adaptive``
    (more while prefills wait, at most four times as much)."""

    transferred_decode_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.75
    """While a prefill waits, younger transferred decodes join only up to this share of tau and of
    the places of ``max_batch_blocks``, so that decodes cannot hold the whole budget for ever (as
    they could at 1)."""

    block_length: Annotated[int, Field(ge=1)] = DEFAULT_BLOCK_LENGTH
    """Positions of a block, in tokens, published for routers; 32 is what LLaDA and Dream use."""

    worker_id: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        default_factory=_default_worker_id
    )
    """Name in the ledger, metrics and logs; unique over the fleet. Default: the host name and
    six random digits, so that two workers on a host differ."""

    worker_name: Annotated[str, Field(max_length=253)] = ""
    """What people call this worker (on Kubernetes the pod's name, while the id is its UID).
    Default: the worker id."""

    node_name: Annotated[str, Field(max_length=253)] = ""
    """The machine it runs on, shown to operators."""

    host: str = "127.0.0.1"
    """Address that the internal API binds. Wildcards need ``advertise_host``."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the internal API; 0 takes a free one."""

    port_range: Annotated[str, Field(pattern=_PORT_RANGE)] | None = None
    """With port 0: take a free port in this range, e.g. ``20000-29999``, which keeps clear of the
    ports that the system hands to outgoing connections."""

    port_file: Path | None = None
    """Where the bound port is written, for whoever started the process."""

    advertise_host: str | None = None
    """Address under which routers and workers reach this one, also the one that KV transfers
    bind. Default: ``host``."""

    internal_token: SecretStr = SecretStr("")
    """The token shared by routers and workers; whoever has it can use the internal API. Must be
    set."""

    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """The ledger's Redis; ``rediss://`` for TLS. Kept out of logs."""

    redis_password: SecretStr | None = None
    """Redis' password, in any characters; wins over one in ``redis_url``."""

    redis_cluster: bool = False
    """Whether ``redis_url`` names a node of a Redis Cluster."""

    redis_namespace: Annotated[str, Field(min_length=1, pattern=r"^[^{}]+$")] = "sangam"
    """Prefix and hash tag of every key; deployments that share a Redis differ in it."""

    redis_timeout_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Longest wait for an answer of Redis, seconds; short against the lease."""

    heartbeat_seconds: Annotated[float, Field(gt=0)] = 1.0
    """Time between two renewals of the lease, seconds; also how soon a desired role is seen."""

    lease_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    """How long the lease outlives its last renewal, seconds: the time after which a dead worker's
    blocks are placed again. At least two heartbeats."""

    transfer_deadline_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Longest time for one block's KV to move, connecting included, seconds; then that pair is
    given up and the block is prefilled again."""

    kv_transport: Literal["auto", "gloo", "nccl"] = "auto"
    """What KV moves by between workers, the same on all of a fleet: ``nccl`` (from GPU to GPU) or
    ``gloo`` (through host memory, slower and in a pass's way). ``auto``: NCCL on CUDA, gloo
    elsewhere."""

    nccl_max_ctas: Annotated[int, Field(ge=1, le=32)] = 4
    """Thread blocks that one NCCL send or receive may occupy on the GPU. On an H200 two moved 77
    GB/s and four 131; a network card moves 50."""

    nccl_max_pairs: Annotated[int, Field(ge=TRANSFERS_EACH_WAY, le=1024)] = 16
    """Other workers that one may be connected with to send KV, and as many to receive it. Each
    takes some 64 MiB of the GPU, set aside at the start. A worker that meets more closes the
    connection used longest ago for the next, and pays for connecting again: set it to the number
    of workers on the other side."""

    drain_deadline_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Longest time that running blocks get at a role switch or a shutdown, seconds; then they are
    lost here and start again elsewhere."""

    ping_seconds: Annotated[float, Field(gt=0)] = 5.0
    """A block's stream that has said nothing for this long says so, seconds; routers take longer
    silence for a dead worker."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 2**20
    """Largest request body, bytes: a block start of a million tokens."""

    body_deadline_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Longest time for a request body to arrive, seconds."""

    head_deadline_seconds: Annotated[float, Field(gt=0)] = 20.0
    """Longest time for a request's head to arrive, from connecting or, on a kept connection, from
    its first byte on, seconds. It ends no stream, and no connection that rests after an answer.
    Routers have ``SANGAM_HEAD_SECONDS``."""

    max_engine_failures: Annotated[int, Field(ge=1)] = 3
    """Failed iterations in a row after which ``/healthz`` fails and the lease lapses: a broken
    device does not heal by itself."""

    engine_stall_seconds: Annotated[float, Field(gt=0)] = 300.0
    """An iteration that runs longer than this, in seconds, counts as a hung device. Long, since a
    large prefill on a CPU takes minutes."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe records that are written."""

    log_format: Literal["json", "console"] = "json"
    """One JSON object a line for machines, or coloured text for people."""

    @field_validator("device", mode="before")
    @classmethod
    def _device_is_known(cls, value: object) -> object:
        """In better words than the pattern's, which the chart's schema has."""
        if isinstance(value, str) and not re.search(_DEVICE, value):
            raise ValueError("must be cpu or cuda:N")
        return value

    @field_validator("admission")
    @classmethod
    def _admission_is_known(cls, value: str) -> str:
        if value not in ADMISSION_POLICIES:
            raise ValueError(f"must be one of {', '.join(ADMISSION_POLICIES)}")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.total_pages is not None and self.pool_bytes is not None:
            raise ValueError("SANGAM_TOTAL_PAGES and SANGAM_POOL_BYTES exclude each other")
        if not self.internal_token.get_secret_value():
            raise ValueError("SANGAM_INTERNAL_TOKEN must be set: routers and workers share it")
        if self.uses_flashinfer and not self.is_on_cuda:
            raise ValueError(
                f"SANGAM_ATTENTION {self.attention} needs a CUDA device, and SANGAM_DEVICE is "
                f"{self.device!r}: set SANGAM_DEVICE to cuda:0, or SANGAM_ATTENTION to auto"
            )
        if self.uses_flashinfer and self.number_format == "float32":
            raise ValueError(
                f"SANGAM_DTYPE float32 has no FlashInfer kernels (SANGAM_ATTENTION "
                f"{self.attention} on {self.device}): set SANGAM_DTYPE to bfloat16, or "
                "SANGAM_ATTENTION to torch"
            )
        if self.kv_transport == "nccl" and not self.is_on_cuda:
            raise ValueError(
                f"SANGAM_KV_TRANSPORT nccl needs a CUDA device, and SANGAM_DEVICE is "
                f"{self.device!r}: set SANGAM_DEVICE to cuda:0, or SANGAM_KV_TRANSPORT to auto"
            )
        shortest_tokens = self.block_length + 1
        if self.max_sequence_tokens is not None and self.max_sequence_tokens < shortest_tokens:
            raise ValueError(
                f"SANGAM_MAX_SEQUENCE_TOKENS {self.max_sequence_tokens} holds no block of "
                f"{self.block_length} tokens and a prompt: set it to {shortest_tokens} or more"
            )
        if self.lease_seconds < 2 * self.heartbeat_seconds:
            raise ValueError("SANGAM_LEASE_SECONDS must be at least two SANGAM_HEARTBEAT_SECONDS")
        if self.host in _WILDCARD_HOSTS and not self.advertise_host:
            raise ValueError(
                f"SANGAM_ADVERTISE_HOST must be set, since SANGAM_HOST is {self.host!r}"
            )
        for name, host in (("HOST", self.host), ("ADVERTISE_HOST", self.advertise_host or "")):
            if host.startswith("["):
                raise ValueError(f"SANGAM_{name} {host!r}: an IPv6 address, but without brackets")
        if self.port_range is not None and not self.ports:
            raise ValueError("SANGAM_PORT_RANGE must be LOW-HIGH with 1 <= LOW <= HIGH <= 65535")
        return self

    @property
    def is_on_cuda(self) -> bool:
        """Whether the device is an NVIDIA GPU."""
        return self.device.partition(":")[0] == "cuda"

    @property
    def number_format(self) -> Literal["float32", "bfloat16"]:
        """``dtype``, decided."""
        if self.dtype == "auto":
            return "bfloat16" if self.is_on_cuda else "float32"
        return self.dtype

    @property
    def attention_backend(self) -> str:
        """``attention``, decided."""
        if self.attention == "auto":
            return "flashinfer" if self.is_on_cuda else "torch"
        return self.attention

    @property
    def uses_flashinfer(self) -> bool:
        """Whether attention and operators are FlashInfer's."""
        return self.attention_backend != "torch"

    @property
    def uses_nccl(self) -> bool:
        """``kv_transport``, decided."""
        return self.kv_transport == "nccl" or (self.kv_transport == "auto" and self.is_on_cuda)

    @property
    def ports(self) -> range:
        """The ports to choose from: the one set, those of the range, or 0 (the system's choice)."""
        if self.port or self.port_range is None:
            return range(self.port, self.port + 1)
        low, high = (int(part) for part in self.port_range.split("-"))
        return range(low, high + 1) if 1 <= low <= high <= 65535 else range(0)

    @property
    def reachable_host(self) -> str:
        """The address that others use."""
        return self.advertise_host or self.host

    def tau_tokens(self, role: Role) -> int:
        """The token budget of an iteration under a role."""
        return {
            Role.PREFILL: self.tau_tokens_prefill,
            Role.DECODE: self.tau_tokens_decode,
            Role.COLOCATED: self.tau_tokens_colocated,
        }[role]
