"""The router's settings tree: every knob, its unit and its reason. Read once, in ``__main__``.

Nothing here acts; a bad value stops the start with one line (``sangam_core.settings``).
"""

import math
import socket
import uuid
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode

from sangam_core.geometry import DEFAULT_BLOCK_LENGTH
from sangam_core.placement import PlacementPolicy
from sangam_core.placements import HYBRID, PLACEMENTS
from sangam_core.settings import ServiceSettings

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
FiniteSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _default_router_id() -> str:
    return f"router-{socket.gethostname()}-{uuid.uuid4().hex[:6]}"


class RouterSettings(ServiceSettings):
    """Settings of one router process."""

    # -- what is served -------------------------------------------------------------------
    model: str = "small"
    """Model whose tokenizer and config are read: ``small`` (comes with Sangam), a folder, or a
    hub id. Only workers with the same ``SANGAM_MODEL`` get this router's work."""
    served_model_name: Annotated[str, Field(min_length=1)] = "sangam-small"
    """Name that clients ask for. Workers are told apart by ``model``, not by this."""
    default_max_tokens: Annotated[int, Field(ge=1)] = 256
    """Answer length in tokens when a request names none; shortened to what fits."""
    fixed_mask_buffer_tokens: Annotated[int, Field(ge=1)] | None = None
    """L in tokens for every request, as in the paper's runs. Unset: ``max_tokens`` rounded up to
    whole blocks, which wastes no compute on masks that nobody asked for."""
    block_length: Annotated[int, Field(ge=1)] = DEFAULT_BLOCK_LENGTH
    """Positions of a block, in tokens. Workers with another value get no work, and ``/admin/fleet``
    says so."""

    # -- where it listens -----------------------------------------------------------------
    public_host: str = "0.0.0.0"
    """Address of the public port (``/v1``, ``/healthz``)."""
    public_port: Port = 8000
    """Public port; 0 takes a free one."""
    internal_host: str = "0.0.0.0"
    """Address of the internal port (``/metrics``, ``/admin``, ``/readyz``, fleet page)."""
    internal_port: Port = 8001
    """Internal port; 0 takes a free one. Never publish it."""
    router_id: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        default_factory=_default_router_id
    )
    """Unique name of this process in Redis; default: host name and a random part."""

    # -- what it talks to -----------------------------------------------------------------
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """Redis >= 6.2 or Valkey; ``rediss://`` for TLS (``?ssl_ca_certs=FILE`` for an own
    authority)."""
    redis_password: SecretStr | None = None
    """Redis' password, in any characters; wins over one in ``redis_url``."""
    redis_namespace: str = "sangam"
    """Prefix of every key, so that deployments can share a Redis."""
    redis_cluster: bool = False
    """Whether ``redis_url`` names a node of a Redis Cluster."""
    redis_timeout_seconds: Seconds = 1.0
    """Longest wait for an answer of Redis."""
    router_lease_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10.0
    """After this long without a heartbeat of this router others reap what it holds."""
    worker_lease_seconds: Seconds = 5.0
    """The workers' ``SANGAM_LEASE_SECONDS``: for so long they may be missing from a Redis that
    came back empty without being taken for lost."""
    fleet_refresh_seconds: Seconds = 1.0
    """How often the fleet is looked at when no request does: how soon a lost lease is seen."""
    poll_seconds: Seconds = 1.0
    """How often the head of the line looks for a place should a wake-up have been lost."""
    internal_token: SecretStr = SecretStr("")
    """Secret shared with the workers, sent with every internal call. Must be set."""

    # -- Kubernetes -----------------------------------------------------------------------
    kubernetes_namespace: Annotated[str, Field(max_length=63)] = ""
    """Namespace whose worker pods' annotations (``sangam.io/role``, ``sangam.io/drain``) this
    router follows. Empty: it follows none."""
    kubernetes_pod_selector: Annotated[str, Field(min_length=1)] = (
        "app.kubernetes.io/name=sangam,app.kubernetes.io/component=worker"
    )
    """Label selector of the worker pods."""
    kubernetes_resync_seconds: Annotated[float, Field(ge=0.1)] = 10.0
    """How often every wish is written again, seconds: for a Redis that lost it, and for wishes
    that could not be granted before."""

    # -- placement ------------------------------------------------------------------------
    theta_tokens: Annotated[float, Field(gt=0)] = math.inf
    """Theta of Algorithm 2: outstanding prefill tokens from which on a prefill worker is passed
    over for a colocated one. Infinite: only for want of pages."""
    placement: str = HYBRID
    """Where prefills go: ``hybrid`` (Algorithm 2), ``shortest_delay`` (overflow by predicted
    delay), ``decode_aware``."""
    max_blocks_per_decoder: Annotated[float, Field(gt=0)] = math.inf
    """New requests wait while the fleet holds this many blocks for each worker that can decode;
    those that have begun go on. Shortens the tail of latencies under overload (see
    ``loadtest/reproduction``). While routers with the bound and without it (or of a version that
    counts no blocks) run beside each other, the latter's blocks are not counted: until they are
    gone, more is let in. Infinite: no bound, as in the paper."""
    overflow: bool = True
    """Whether prefills may overflow to colocated workers at all; off is static disaggregation."""

    # -- limits ---------------------------------------------------------------------------
    max_body_bytes: Annotated[int, Field(ge=1024)] = 2 * 1024 * 1024
    """Largest request body (413 beyond): a 128k-token prompt as text is about 500 kB."""
    body_seconds: Seconds = 20.0
    """Time a client has to send its body (408 then), against bodies that never end."""
    head_seconds: Seconds = 20.0
    """Time a client has to send a request's head, from connecting or, on a kept connection, from
    its first byte on (408 then), against heads that never end."""
    max_fan_out: Annotated[int, Field(ge=1)] = 64
    """Answers one HTTP request may ask for (prompts x n; 400 beyond)."""
    max_waiting: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait in line over all routers (429 beyond): what would wait longer than
    a client does is better refused."""
    no_worker_seconds: Seconds = 20.0
    """How long a request waits while no worker could ever take it (503 then): longer than a
    worker's restart takes to show, shorter than a client's patience."""
    stall_seconds: Seconds = 60.0
    """The same for an answer that has begun, Redis's being away included: it has cost something,
    and its client has seen that it goes on."""
    request_seconds: Seconds = 600.0
    """Deadline of a request from arrival to its last token (504, or an error event)."""

    # -- failure --------------------------------------------------------------------------
    max_lost: Annotated[int, Field(ge=0)] = 16
    """How often blocks of one request may be lost and started again before it fails."""
    backoff_seconds: Seconds = 0.05
    """Pause after a lost block or a refusal; doubles with each in a row, up to the maximum."""
    max_backoff_seconds: Seconds = 2.0
    """Longest such pause."""
    connect_seconds: Seconds = 2.0
    """Time a worker has to accept a connection."""
    answer_seconds: Seconds = 30.0
    """Time a worker has to answer a block's start: it reserves pages between two iterations."""
    send_seconds: Seconds = 60.0
    """A client that takes no byte for this long is given up: it must not hold memory for ever."""
    silence_seconds: Seconds = 15.0
    """A worker's stream without a line (pings count) for this long is taken for broken."""
    settle_seconds: Seconds = 2.0
    """How long the last line of a finished block is waited for: every token is there, so the answer
    must not hang on it."""
    redis_grace_seconds: Annotated[float, Field(ge=0)] = 300.0
    """How long the router calls itself ready without Redis (requests wait, then get 503), so that
    a Redis restart takes no router out of its load balancer."""
    keep_alive_seconds: Seconds = 10.0
    """Silence after which a stream gets a comment, so that proxies do not cut it."""
    shutdown_seconds: FiniteSeconds = 60.0
    """Time requests in flight have to finish after SIGTERM."""

    # -- access and logs ------------------------------------------------------------------
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Keys accepted in ``Authorization: Bearer``, separated by commas. None: open to all.
    Keys beyond ASCII work, but some clients (OpenAI's for Python) cannot send them."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    log_format: Literal["json", "console"] = "json"
    """``json`` for machines, ``console`` for people."""

    @field_validator("api_keys", mode="before")
    @classmethod
    def _split_keys(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        keys = tuple(key.strip() for key in value.split(",") if key.strip())
        if value.strip() and not keys:
            raise ValueError("holds no key between its commas; leave it empty to be open to all")
        return keys

    @field_validator("fixed_mask_buffer_tokens", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("placement")
    @classmethod
    def _placement_is_known(cls, value: str) -> str:
        if value not in PLACEMENTS:
            raise ValueError(f"must be one of {', '.join(PLACEMENTS)}")
        return value

    @field_validator("theta_tokens", "max_blocks_per_decoder", mode="before")
    @classmethod
    def _infinity_in_words(cls, value: object) -> object:
        return (
            math.inf if isinstance(value, str) and value.lower() in {"inf", "infinity"} else value
        )

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if not self.internal_token.get_secret_value():
            raise ValueError("SANGAM_INTERNAL_TOKEN must be set: routers and workers share it")
        buffer = self.fixed_mask_buffer_tokens
        if buffer is not None and buffer % self.block_length:
            raise ValueError(
                f"SANGAM_FIXED_MASK_BUFFER_TOKENS={buffer} must be a multiple of "
                f"SANGAM_BLOCK_LENGTH={self.block_length}"
            )
        return self

    @property
    def policy(self) -> PlacementPolicy:
        """Which placement, and its parameters."""
        return PlacementPolicy(
            theta_tokens=self.theta_tokens,
            is_overflow_allowed=self.overflow,
            name=self.placement,
            max_blocks_per_decoder=self.max_blocks_per_decoder,
        )
