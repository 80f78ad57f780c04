"""The fleet as seen from outside: pods from the API server, joined with what routers say of them.

Decides nothing: ``look`` reads, ``FleetView`` answers questions that several commands have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sangam_core.placement import Role
from sangam_router.kubectl.cluster import Cluster
from sangam_router.kubectl.plan import Worker
from sangam_router.kubectl.pods import PodInfo
from sangam_router.kubectl.routers import FleetReport, RoutersUnreachable, WorkerReport, ask_any


@dataclass(frozen=True, slots=True)
class FleetView:
    """What is known at one moment.

    Attributes:
        pods: the worker pods, also those that are leaving.
        report: a router's answer; None when none answers, ``problem`` then says why.
    """

    pods: tuple[PodInfo, ...]
    routers: tuple[PodInfo, ...]
    report: FleetReport | None
    problem: str | None = None

    @property
    def staying(self) -> list[PodInfo]:
        """The worker pods that are not on their way out."""
        return [pod for pod in self.pods if not pod.is_leaving]

    def pod(self, name: str) -> PodInfo | None:
        """A worker pod by its name."""
        return next((pod for pod in self.pods if pod.name == name), None)

    def worker(self, pod: PodInfo) -> WorkerReport | None:
        """What the routers know of a pod; None while it is not registered."""
        return self.report.worker(pod) if self.report is not None else None

    def known_report(self) -> FleetReport:
        """The routers' answer. Raises ``RoutersUnreachable``."""
        if self.report is None:
            raise RoutersUnreachable(f"no router answers: {self.problem}")
        return self.report


def look(cluster: Cluster) -> FleetView:
    """Read the fleet. Raises ``ClusterUnavailable``, ``ClusterRefused``; routers may be away."""
    pods, routers = tuple(cluster.pods("worker")), tuple(cluster.pods("router"))
    try:
        return FleetView(pods, routers, ask_any(cluster, routers))
    except RoutersUnreachable as error:
        return FleetView(pods, routers, None, str(error))


def standing_role(pod: PodInfo, worker: WorkerReport) -> Role:
    """The role that a worker has or is about to have: its wish, unless the routers refuse that."""
    is_refused = worker.refused is not None and worker.refused.role == pod.wished_role
    if is_refused or pod.wished_role not in set(Role):
        return Role(worker.role)
    return Role(pod.wished_role)


def planned_workers(view: FleetView, pods: Sequence[PodInfo]) -> list[Worker]:
    """The pods as a plan wants them; all must be registered and have a boot role."""
    planned = []
    for pod in pods:
        worker = view.worker(pod)
        assert worker is not None
        assert pod.boot_role is not None
        is_drain_refused = worker.refused is not None and worker.refused.is_drained
        planned.append(
            Worker(
                name=pod.name,
                ordinal=pod.ordinal,
                boot_role=pod.boot_role,
                role=standing_role(pod, worker),
                annotation=pod.role_wish,
                is_drained=pod.is_drain_wished and not is_drain_refused,
                load=(worker.outstanding_prefill_tokens, worker.num_blocks, worker.used_pages),
            )
        )
    return planned
