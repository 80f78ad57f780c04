"""What the watcher needs of an API server: the pods now, and what happens to them after that."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from sangam_core.errors import SangamError


class PodsUnavailable(SangamError):
    """The API server does not answer, or refuses; the text says which."""


class HistoryGone(SangamError):
    """The API server no longer knows what happened since that version (410): list again."""


@dataclass(frozen=True, slots=True)
class PodList:
    """All worker pods, and the version from which to watch on."""

    pods: Sequence[Mapping[str, Any]]
    version: str


@dataclass(frozen=True, slots=True)
class PodEvent:
    """One thing that happened.

    Attributes:
        kind: ``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK`` (nothing but a newer version).
        pod: the Pod object as JSON.
    """

    kind: str
    pod: Mapping[str, Any]

    @property
    def version(self) -> str:
        """The resourceVersion up to which everything has been told."""
        return str(self.pod["metadata"]["resourceVersion"])


class PodSource(Protocol):
    """The worker pods of one release."""

    async def list(self) -> PodList:
        """All pods. Raises ``PodsUnavailable``."""
        ...

    def watch(self, version: str) -> AbstractAsyncContextManager[AsyncIterator[PodEvent]]:
        """What happens after ``version``; ends by itself after a while, to be asked for again.

        Raises:
            HistoryGone: list again.
            PodsUnavailable: the connection failed, or fell silent for too long.
        """
        ...
