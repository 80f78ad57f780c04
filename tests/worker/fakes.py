"""A toy engine behind the worker's seams: exact, fast, and unable to hide a lost byte.

Its KV is a function of token and position, and what a pass predicts is read back from the pages
it is given. A block that decodes on pages whose content was not moved, or moved wrongly, gives
other tokens than ``toy_answer`` says.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sangam_core.decoding import Commit
from sangam_core.geometry import PAGE_TOKENS
from sangam_core.rules import Family
from sangam_worker.plan import Outcome, Pass, PassOutcome, Plan
from sangam_worker.transfer.protocol import KVChannel, KVTransport, Side

MASK_ID = 1
VOCAB_SIZE = 500
NEVER = threading.Event()
"""Set by nobody: for connecting that nobody gives up."""


@dataclass(frozen=True)
class ToyModel:
    """The facts of the toy model."""

    family: Family = "llada"
    mask_id: int = MASK_ID
    vocab_size: int = VOCAB_SIZE
    max_sequence_tokens: int = 4096
    eos_ids: tuple[int, ...] = ()


class ToyPool:
    """A KV pool of two layers with one head of two dimensions."""

    page_shape = (2, PAGE_TOKENS, 1, 2)

    def __init__(self, total_pages: int = 64, num_layers: int = 2) -> None:
        self.total_pages = total_pages
        self.num_layers = num_layers
        self.layers = torch.zeros((num_layers, total_pages, *self.page_shape))

    @property
    def device(self) -> torch.device:
        return self.layers.device

    def gather(self, layer: int, pages: Sequence[int]) -> torch.Tensor:
        return self.layers[layer, list(pages)].contiguous()

    def scatter(self, layer: int, pages: Sequence[int], tensor: torch.Tensor) -> None:
        self.layers[layer, list(pages)] = tensor

    def write(self, item: Pass) -> None:
        """Keep a function of token and position for every row fed, other in each layer."""
        for position, token in zip(item.positions, item.tokens, strict=True):
            page, slot = item.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            for layer in range(self.num_layers):
                self.layers[layer, page, :, slot] = float(_kv(layer, position, token))

    def prompt_sum(self, item: Pass, stop: int) -> int:
        """What all layers keep of the positions before ``stop``, with K and V in accord."""
        total = 0
        for layer in range(self.num_layers):
            rows = self.gather(layer, item.pages)[:, :, :, 0, 0]
            keys, values = rows[:, 0].reshape(-1)[:stop], rows[:, 1].reshape(-1)[:stop]
            assert torch.equal(keys, values)
            total += int(keys.sum().item())
        return total


@dataclass
class ToyEngine:
    """Commits the first masks of a block, so many a pass. Its device is the wait for an outcome.

    Attributes:
        gate: cleared, it holds up every iteration that is under way, until a test sets it again.
        closes_after: so many iterations run, then the engine closes its gate itself: a test that
            closes it when it has seen a pass may be too late. 0 never does.
        failures: exceptions that the next outcomes raise, one each; launch_failures: launches.
        poison: request ids whose passes fail by themselves.
        device_seconds: what every iteration says of itself.
        num_iterations: how many have been launched.
    """

    commits_per_pass: int = 8
    kv_pool: ToyPool = field(default_factory=ToyPool)
    model_config: ToyModel = ToyModel()
    gate: threading.Event = field(default_factory=threading.Event)
    closes_after: int = 0
    failures: list[Exception] = field(default_factory=list)
    launch_failures: list[Exception] = field(default_factory=list)
    poison: set[str] = field(default_factory=set)
    device_seconds: float | None = None
    num_iterations: int = 0
    is_under_way: bool = False
    _begun: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.gate.set()

    def has_begun(self, num_iterations: int) -> bool:
        """Wait until so many iterations have begun."""
        with self._begun:
            return self._begun.wait_for(lambda: self.num_iterations >= num_iterations, 20)

    def launch(self, plan: Plan) -> "ToyLaunched":
        assert not self.is_under_way, "one iteration at a time"
        with self._begun:
            self.num_iterations += 1
            if self.closes_after and self.num_iterations == self.closes_after + 1:
                self.gate.clear()
            self._begun.notify_all()
        if self.launch_failures:
            raise self.launch_failures.pop(0)
        self.is_under_way = True
        return ToyLaunched(self, plan)

    def execute(self, plan: Plan) -> Outcome:
        return self.launch(plan).outcome()

    def finish(self, plan: Plan) -> Outcome:
        assert self.gate.wait(30), "a test closed the gate and forgot it"
        self.is_under_way = False
        if self.failures:
            raise self.failures.pop(0)
        return Outcome(plan.iteration, tuple(self._run(item) for item in plan.passes))

    def _run(self, item: Pass) -> PassOutcome:
        if item.key.request_id in self.poison:
            return PassOutcome(item.key, (), error="not numbers")
        start = item.block.start
        if item.pages:
            self.kv_pool.write(item)
            secret = self.kv_pool.prompt_sum(item, start)
        else:
            secret = sum(_kv(0, p, t) + _kv(1, p, t) for p, t in enumerate(item.tokens[:start]))
        chosen = item.masked[: self.commits_per_pass]
        commits = tuple(Commit(position=p, token=_token(secret, p), confidence=0.5) for p in chosen)
        return PassOutcome(item.key, commits, carry=item.carry + len(commits))


@dataclass(frozen=True)
class ToyLaunched:
    """An iteration of a toy engine under way."""

    engine: ToyEngine
    plan: Plan

    @property
    def device_seconds(self) -> float | None:
        return self.engine.device_seconds

    def outcome(self) -> Outcome:
        return self.engine.finish(self.plan)


def toy_answer(ids: Sequence[int], block: range) -> list[int]:
    """The tokens of a block, given everything before it."""
    secret = sum(_kv(0, p, t) + _kv(1, p, t) for p, t in enumerate(ids[: block.start]))
    return [_token(secret, position) for position in block]


def _kv(layer: int, position: int, token: int) -> int:
    return (layer + 1) * token * (position % 7 + 1)


def _token(secret: int, position: int) -> int:
    return 2 + (secret * 31 + position * 7) % (VOCAB_SIZE - 2)


class GatedTransport:
    """A transport whose channels move nothing while the gate is closed.

    Attributes:
        num_held_up: calls that have come to the gate.
        complaint: what it says when it is asked how it is.
    """

    def __init__(self, inner: KVTransport) -> None:
        self.inner = inner
        self.gate = threading.Event()
        self.gate.set()
        self.num_held_up = 0
        self.complaint: str | None = None

    def ailment(self) -> str | None:
        return self.complaint

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def staging_bytes(self) -> int:
        return self.inner.staging_bytes

    @property
    def transfers_each_way(self) -> int:
        return self.inner.transfers_each_way

    @property
    def pairs_each_way(self) -> int:
        return self.inner.pairs_each_way

    def offer(self) -> str:
        return self.inner.offer()

    def connect(
        self,
        side: Side,
        communicator: str,
        offer: str,
        timeout_seconds: float,
        given_up: threading.Event,
    ) -> KVChannel:
        channel = self.inner.connect(side, communicator, offer, timeout_seconds, given_up)
        return GatedChannel(self, channel)

    def close(self) -> None:
        self.inner.close()


class GatedChannel:
    """A channel behind its transport's gate."""

    def __init__(self, transport: GatedTransport, inner: KVChannel) -> None:
        self._transport = transport
        self._inner = inner

    def send(self, pages: Sequence[int], timeout_seconds: float) -> int:
        self._pass_gate()
        return self._inner.send(pages, timeout_seconds)

    def receive(self, pages: Sequence[int], timeout_seconds: float) -> int:
        self._pass_gate()
        return self._inner.receive(pages, timeout_seconds)

    def abort(self) -> None:
        self._inner.abort()

    def _pass_gate(self) -> None:
        self._transport.num_held_up += 1
        assert self._transport.gate.wait(30), "a test closed the gate and forgot it"
