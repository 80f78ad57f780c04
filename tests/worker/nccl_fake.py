"""NCCL's semantics without GPUs: ranks of one process meet by a unique id and move tensors.

Every call is bound against the installed release's signatures. As in NCCL, a non-blocking call
returns at once and is queued on its stream only when the state, asked for often enough, has become
"success"; a call before that is misuse, and so is a kernel on that stream. Operations of one
direction meet in order; ends that disagree on a size wait for each other for ever. An abort ends
what is under way, in any thread, and returns when the streams have done what was before it.

What NCCL takes without a word and is wrong all the same is noted in ``FakeNetwork.misuses``: two
threads in one communicator, a thread whose device is another.
"""

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from tests.worker.nccl_installed import bind
from tests.worker.side_streams_fake import FakeMark, current_device, stream_of

from sangam_worker.transfer.nccl_library import IN_PROGRESS, SUCCESS, UNIQUE_ID_BYTES

REMOTE_ERROR = 6
_POLLS = 2
"""How often a call's state is asked for before it has been queued."""

_numbers = itertools.count(1)


class FakeNcclError(Exception):
    """As ``NCCLError``."""


@dataclass(eq=False)
class _Posted:
    tensor: torch.Tensor
    is_done: bool = False


@dataclass(eq=False)
class _Meeting:
    """Of one unique id. ``changed`` guards it and all its ranks."""

    num_ranks: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    ranks: dict[int, "FakeCommunicator"] = field(default_factory=dict)
    sends: dict[tuple[int, int], deque[_Posted]] = field(default_factory=dict)
    receives: dict[tuple[int, int], deque[_Posted]] = field(default_factory=dict)

    def match(self, route: tuple[int, int]) -> None:
        sends, receives = self.sends.get(route), self.receives.get(route)
        while sends and receives and sends[0].tensor.nbytes == receives[0].tensor.nbytes:
            sent, received = sends.popleft(), receives.popleft()
            received.tensor.copy_(sent.tensor)
            sent.is_done = received.is_done = True
        self.changed.notify_all()


class FakeNetwork:
    """What ranks meet on.

    Attributes:
        tells_of_ends: whether a rank learns that its peer has aborted (as over a network card).
        stuck_in: names of calls that do not return until the communicator is aborted.
        misuses: what would have gone wrong in NCCL without an error.
    """

    def __init__(self) -> None:
        self.misuses: list[str] = []
        self.meetings: dict[bytes, _Meeting] = {}
        self.tells_of_ends = True
        self.stuck_in: set[str] = set()
        self.lock = threading.Lock()

    def library(self) -> "FakeNccl":
        """What one worker imports."""
        return FakeNccl(self)


class _UniqueId:
    def __init__(self, content: bytes) -> None:
        assert len(content) == UNIQUE_ID_BYTES
        self.content = content

    def __bytes__(self) -> bytes:
        return self.content

    @staticmethod
    def from_bytes(b: bytes) -> "_UniqueId":
        bind("UniqueId.from_bytes", b)
        return _UniqueId(b)


class _Config:
    def __init__(self, *, blocking: bool, max_ctas: int) -> None:
        bind("NCCLConfig", blocking=blocking, max_ctas=max_ctas)
        assert not blocking
        assert 1 <= max_ctas <= 32
        self.max_ctas = max_ctas


class FakeNccl:
    """``nccl.core``.

    Attributes:
        configs: those that communicators were made with.
        made: the communicators.
    """

    UniqueId = _UniqueId
    NCCLConfig = _Config

    def __init__(self, network: FakeNetwork) -> None:
        self.network = network
        self.configs: list[_Config] = []
        self.made: list[FakeCommunicator] = []
        self._grouped = threading.local()

    @property
    def num_open(self) -> int:
        """Communicators that hold memory."""
        return sum(not each.is_freed for each in self.made)

    @property
    def Communicator(self) -> "FakeNccl":  # noqa: N802 - nccl4py's name
        """Its ``init`` is all that is used of the class."""
        return self

    def init(
        self, nranks: int, rank: int, unique_id: _UniqueId, config: _Config
    ) -> "FakeCommunicator":
        bind("Communicator.init", nranks, rank, unique_id, config)
        assert 0 <= rank < nranks
        self.configs.append(config)
        with self.network.lock:
            meeting = self.network.meetings.setdefault(bytes(unique_id), _Meeting(nranks))
        self.made.append(FakeCommunicator(self, meeting, rank))
        return self.made[-1]

    def get_unique_id(self) -> _UniqueId:
        bind("get_unique_id")
        return _UniqueId(next(_numbers).to_bytes(UNIQUE_ID_BYTES, "big"))

    def get_error_string(self, result: int) -> str:
        bind("get_error_string", result)
        return {REMOTE_ERROR: "remote process exited"}.get(result, f"error {result}")

    def get_version(self) -> object:
        bind("get_version")
        return None

    @contextmanager
    def group(self) -> Iterator[None]:
        bind("group")
        self._grouped.operations = []
        yield
        operations, self._grouped.operations = self._grouped.operations, None
        for communicator in {communicator for communicator, _ in operations}:
            communicator.queue([each for owner, each in operations if owner is communicator])

    def add(self, communicator: "FakeCommunicator", operation: "_Operation") -> None:
        """To the thread's group, or by itself."""
        operations = getattr(self._grouped, "operations", None)
        if operations is None:
            communicator.queue([operation])
        else:
            operations.append((communicator, operation))


@dataclass(frozen=True)
class _Operation:
    posts: dict[tuple[int, int], deque[_Posted]]
    route: tuple[int, int]
    posted: _Posted
    stream: int


class FakeCommunicator:
    """One rank.

    Attributes:
        is_freed: its memory is given back.
    """

    def __init__(self, library: FakeNccl, meeting: _Meeting, rank: int) -> None:
        self.is_freed = False
        self._network = library.network
        self._library = library
        self._meeting = meeting
        self._rank = rank
        self._device = current_device()
        self._polls_left = _POLLS
        self._waiting: list[_Operation] = []
        self._launched: list[FakeMark] = []
        self._calling: str | None = None
        self._is_aborted = False
        self._failure = SUCCESS
        if self._device is None:
            self._network.misuses.append("init: the thread names no device")
        with meeting.changed:
            assert rank not in meeting.ranks, "NCCL refuses the same rank twice"
            meeting.ranks[rank] = self

    def get_async_error(self) -> int:
        bind("Communicator.get_async_error")
        with self._call("get_async_error"), self._meeting.changed:
            self._check()
            if self._failure != SUCCESS:
                return self._failure
            if len(self._meeting.ranks) < self._meeting.num_ranks:
                return IN_PROGRESS
            if self._polls_left:
                self._polls_left -= 1
                return IN_PROGRESS
            operations, self._waiting = self._waiting, []
            self._let_go(operations)
            for handle in {each.stream for each in operations}:
                mine = [each for each in operations if each.stream == handle]
                stream = stream_of(handle)
                stream.launch(lambda mine=mine: self._carry_out(mine))  # type: ignore[misc]
                self._launched.append(stream.mark())
        return SUCCESS

    def send(self, sendbuf: torch.Tensor, peer: int, *, stream: int) -> None:
        bind("Communicator.send", sendbuf, peer, stream=stream)
        with self._call("send"):
            self._add("send", self._meeting.sends, (self._rank, peer), sendbuf, stream)

    def recv(self, recvbuf: torch.Tensor, peer: int, *, stream: int) -> None:
        bind("Communicator.recv", recvbuf, peer, stream=stream)
        with self._call("recv"):
            self._add("recv", self._meeting.receives, (peer, self._rank), recvbuf, stream)

    def abort(self) -> None:
        bind("Communicator.abort")
        if self._calling is not None and self._calling not in self._network.stuck_in:
            self._network.misuses.append(f"abort while another thread is in {self._calling}")
        with self._meeting.changed:
            self._is_aborted = True
            self._let_go(self._waiting)
            for other in self._meeting.ranks.values():
                if other is not self and self._network.tells_of_ends:
                    other._failure = REMOTE_ERROR
            self._meeting.changed.notify_all()
        for mark in self._launched:
            while not (mark.stream.failure or mark.stream.is_closed or mark.passed.wait(0.01)):
                pass
        self.is_freed = True

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        if self._calling is not None:
            self._network.misuses.append(f"{name} while another thread is in {self._calling}")
        if name != "get_async_error" and current_device() is not self._device:
            self._network.misuses.append(f"{name}: the thread's device is another")
        self._calling = name
        try:
            yield
        finally:
            self._calling = None

    def _let_go(self, operations: list[_Operation]) -> None:
        for each in operations:
            stream_of(each.stream).is_nccls = False

    def queue(self, operations: list[_Operation]) -> None:
        """What a call, or the end of a group, does."""
        routes = [each.route for each in operations if each.route[0] == each.route[1]]
        if any(routes.count(route) % 2 for route in routes):
            raise FakeNcclError("invalid usage: unmatched send or receive to oneself")
        with self._meeting.changed:
            self._waiting += operations
            self._polls_left = _POLLS
            for each in operations:
                stream_of(each.stream).is_nccls = True

    def _add(
        self,
        name: str,
        posts: dict[tuple[int, int], deque[_Posted]],
        route: tuple[int, int],
        tensor: torch.Tensor,
        stream: int,
    ) -> None:
        with self._meeting.changed:
            self._check()
            if name in self._network.stuck_in:
                self._meeting.changed.wait_for(lambda: self._is_aborted, 60)
                raise FakeNcclError("the call was aborted")
            if self._polls_left or self._waiting:
                raise FakeNcclError("invalid usage: a call is still in progress")
        assert tensor.is_contiguous()
        assert stream, "the default stream is the engine's"
        if stream_of(stream).device is not self._device:
            raise FakeNcclError("unhandled cuda error: a stream of another device")
        operation = _Operation(posts, route, _Posted(tensor), stream)
        self._library.add(self, operation)

    def _check(self) -> None:
        if self._is_aborted:
            raise FakeNcclError("Communicator not initialized")

    def _carry_out(self, operations: list[_Operation]) -> None:
        """On the stream: post, and wait for the other ranks'."""
        meeting = self._meeting
        with meeting.changed:
            if self._is_aborted:
                return
            for each in operations:
                each.posts.setdefault(each.route, deque()).append(each.posted)
                meeting.match(each.route)
            posted = [each.posted for each in operations]
            meeting.changed.wait_for(
                lambda: self._is_aborted or all(each.is_done for each in posted), 60
            )
            for each in operations:
                if not each.posted.is_done:
                    each.posts[each.route].remove(each.posted)
