"""What the routers know of the fleet, asked by port-forward through the API server.

A port-forward ends in the pod's own network, so it works whatever network policies say and
wherever the operator is. One connection a question: routers come and go, and any of them can
answer, since they share one ledger. Decides which router to ask next.
"""

import http.client
import json
import socket
from collections.abc import Sequence
from typing import Any

import websocket
from kubernetes import client, stream
from pydantic import BaseModel, ConfigDict, ValidationError

from sangam_core.errors import SangamError
from sangam_router.kubectl.cluster import Cluster
from sangam_router.kubectl.pods import PodInfo

_ANSWER_SECONDS = 5.0


class RoutersUnreachable(SangamError):
    """No router answered; the text says why, router by router."""


class _Read(BaseModel):
    """Of another version's answer, what is known is taken."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Refusal(_Read):
    """A wish that the routers did not grant."""

    role: str | None = None
    is_drained: bool = False
    reason: str = ""


class WorkerReport(_Read):
    """A worker in ``/admin/fleet``; its id is the pod's UID."""

    worker_id: str
    name: str = ""
    node: str = ""
    url: str = ""
    role: str
    desired_role: str | None = None
    is_draining: bool = False
    is_drain_desired: bool = False
    refused: Refusal | None = None
    outstanding_prefill_tokens: int = 0
    free_pages: int = 0
    total_pages: int = 0
    free_pages_at_worker: int | None = None
    max_sequence_tokens: int | None = None
    num_waiting: int = 0
    num_running: int = 0
    version: str = ""
    protocol: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that wait or run there."""
        return self.num_waiting + self.num_running

    @property
    def used_pages(self) -> int:
        """Pages reserved in the ledger or held at the worker, whichever is more."""
        at_worker = self.total_pages
        if self.free_pages_at_worker is not None:
            at_worker = self.free_pages_at_worker
        return self.total_pages - min(self.free_pages, at_worker)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no block and none is on its way."""
        return not (self.outstanding_prefill_tokens or self.num_blocks or self.used_pages)


class WaitingReport(_Read):
    """The central lines, over all routers."""

    num_prefills: int = 0
    num_decodes: int = 0


class WatcherReport(_Read):
    """How the router's watcher of the pods is."""

    is_enabled: bool = False
    is_synced: bool = False
    last_event_seconds_ago: float | None = None
    problem: str | None = None


class FleetReport(_Read):
    """Answer of ``/admin/fleet``."""

    is_ready: bool = False
    problem: str | None = None
    remark: str | None = None
    router: str = ""
    workers: tuple[WorkerReport, ...] = ()
    incompatible_workers: tuple[dict[str, Any], ...] = ()
    waiting: WaitingReport = WaitingReport()
    watcher: WatcherReport = WatcherReport()

    def worker(self, pod: PodInfo) -> WorkerReport | None:
        """What is known of a pod; None while it is not registered."""
        return next((each for each in self.workers if each.worker_id == pod.uid), None)


def ask(cluster: Cluster, router: PodInfo) -> FleetReport:
    """What one router says of the fleet.

    Raises:
        RoutersUnreachable: it does not answer, or not with a fleet.
    """
    try:
        body = _get(cluster, router, "/admin/fleet")
        return FleetReport.model_validate(json.loads(body))
    except (client.ApiException, http.client.HTTPException, OSError) as error:
        text = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise RoutersUnreachable(f"{router.name}: {text}") from None
    except (ValueError, ValidationError) as error:
        raise RoutersUnreachable(
            f"{router.name}: its answer is no fleet ({str(error).splitlines()[0]})"
        ) from None


def ask_any(cluster: Cluster, routers: Sequence[PodInfo]) -> FleetReport:
    """What the first router that answers says, ready ones first.

    Raises:
        RoutersUnreachable: none does.
    """
    problems = []
    for router in sorted(routers, key=lambda router: not router.is_ready):
        if router.phase != "Running":
            problems.append(f"{router.name}: {router.problem}")
            continue
        try:
            return ask(cluster, router)
        except RoutersUnreachable as error:
            problems.append(str(error))
    raise RoutersUnreachable("; ".join(problems) or "the release has no router pods")


class _ForwardedConnection(http.client.HTTPConnection):
    """HTTP over a port-forward's end of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__("localhost", timeout=_ANSWER_SECONDS)
        self._end = end

    def connect(self) -> None:
        self._end.settimeout(_ANSWER_SECONDS)
        self.sock = self._end


def _get(cluster: Cluster, router: PodInfo, path: str) -> bytes:
    # The client gives its websockets no deadline of their own: an API server that is away would
    # be waited for without end.
    websocket.setdefaulttimeout(_ANSWER_SECONDS)
    # A client of its own: opening a stream swaps a method of the client while it lasts.
    with client.ApiClient(cluster.configuration) as api:
        forward = stream.portforward(
            client.CoreV1Api(api).connect_get_namespaced_pod_portforward,
            router.name,
            cluster.namespace,
            ports=str(router.internal_port),
        )
    try:
        connection = _ForwardedConnection(forward.socket(router.internal_port))
        connection.request("GET", path, headers={"Connection": "close"})
        response = connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"answers {response.status} to GET {path}")
        return body
    except (http.client.HTTPException, OSError) as error:
        told = forward.error(router.internal_port)
        raise http.client.HTTPException(told.strip() if told else str(error)) from None
    finally:
        forward.close()
