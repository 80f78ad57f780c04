"""What ``status`` shows: one record a pod, and what is to be said of routers, line and watcher.

Gathers and joins; how it looks is ``status_view``'s. Works without any router: the pods are shown
and the rest is said to be missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sangam_router.kubectl.cluster import Cluster
from sangam_router.kubectl.pods import PodInfo
from sangam_router.kubectl.routers import FleetReport, RoutersUnreachable, WorkerReport, ask


@dataclass(frozen=True, slots=True)
class RouterState:
    """A router pod and its answer, or why there is none (a leaving one is not asked)."""

    pod: PodInfo
    report: FleetReport | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Status:
    """Everything at one moment.

    Attributes:
        report: one router's answer: the ledger is the same for all.
    """

    namespace: str
    release: str
    pods: tuple[PodInfo, ...]
    routers: tuple[RouterState, ...]
    report: FleetReport | None

    @property
    def strays(self) -> list[WorkerReport]:
        """Workers that are registered, though no pod stands behind them."""
        uids = {pod.uid for pod in self.pods}
        workers = self.report.workers if self.report is not None else ()
        return [worker for worker in workers if worker.worker_id not in uids]

    def worker(self, pod: PodInfo) -> WorkerReport | None:
        """What the routers know of a pod."""
        return self.report.worker(pod) if self.report is not None else None

    @property
    def problems(self) -> list[str]:
        """What an operator should know, in whole sentences."""
        told = [f"router {each.pod.name}: {each.problem}" for each in self.routers if each.problem]
        if not self.routers:
            told.append("the release has no router pods")
        if self.report is None:
            told.append("no router answers: loads, effective roles and the line are not known")
            return told
        if self.report.problem:
            told.append(f"the fleet cannot serve: {self.report.problem}")
        if self.report.remark:
            told.append(self.report.remark)
        told += [
            f"incompatible worker {self._name(str(worker.get('worker_id')))}: "
            f"{_misfit(worker)}; it gets no work"
            for worker in self.report.incompatible_workers
        ]
        return told

    def _name(self, worker_id: str) -> str:
        return next((pod.name for pod in self.pods if pod.uid == worker_id), worker_id)


def _misfit(worker: Mapping[str, Any]) -> str:
    """Why routers cannot use a worker; those of an older version do not say what differs."""
    told = f"model {worker.get('model')}, protocol {worker.get('protocol')}"
    return str(worker.get("reason") or told)


def gather(cluster: Cluster) -> Status:
    """Read pods and ask every running router. Raises ``ClusterUnavailable``, ``ClusterRefused``."""
    pods = cluster.pods("worker")
    routers = [_router_state(cluster, pod) for pod in cluster.pods("router")]
    return Status(
        namespace=cluster.namespace,
        release=cluster.release,
        pods=tuple(pods),
        routers=tuple(routers),
        report=_best([each.report for each in routers if each.report is not None]),
    )


def state_of(pod: PodInfo, worker: WorkerReport | None, *, is_known: bool) -> str:
    """A pod's state in a few words.

    Args:
        is_known: whether a router answered, so that a missing worker means something.
    """
    if pod.is_leaving:
        return "terminating"
    if worker is None:
        if not pod.is_ready:
            return pod.problem
        return "not registered" if is_known else "ready"
    said = []
    if worker.refused is not None:
        wish = "drain" if worker.refused.is_drained else worker.refused.role
        said.append(f"refused: {wish} ({worker.refused.reason})")
    if worker.is_drain_desired:
        said.append("drained" if worker.is_draining and worker.is_empty else "draining")
    elif worker.is_draining:
        said.append("switching" if worker.desired_role != worker.role else "draining")
    if not pod.is_ready:
        said.append(pod.problem)
    return "; ".join(said) or "serving"


def as_json(status: Status) -> dict[str, Any]:
    """The status for programs."""
    report = status.report
    return {
        "namespace": status.namespace,
        "release": status.release,
        "problems": status.problems,
        "workers": [
            _pod_json(pod, status.worker(pod), is_known=report is not None) for pod in status.pods
        ],
        "strays": [worker.model_dump() for worker in status.strays],
        "incompatible_workers": [*report.incompatible_workers] if report is not None else None,
        "waiting": report.waiting.model_dump() if report is not None else None,
        "routers": [
            {
                "pod": each.pod.name,
                "node": each.pod.node,
                "is_ready": each.pod.is_ready,
                "problem": each.problem,
                "watcher": each.report.watcher.model_dump() if each.report is not None else None,
            }
            for each in status.routers
        ],
    }


def _pod_json(pod: PodInfo, worker: WorkerReport | None, *, is_known: bool) -> dict[str, Any]:
    return {
        "pod": pod.name,
        "uid": pod.uid,
        "node": pod.node,
        "phase": pod.phase,
        "is_ready": pod.is_ready,
        "problem": pod.problem or None,
        "boot_role": pod.boot_role.value if pod.boot_role is not None else None,
        "desired_role": pod.wished_role,
        "is_drain_desired": pod.is_drain_wished,
        "state": state_of(pod, worker, is_known=is_known),
        "worker": worker.model_dump() if worker is not None else None,
    }


def _router_state(cluster: Cluster, pod: PodInfo) -> RouterState:
    if pod.is_leaving:
        return RouterState(pod, None, None)
    if pod.phase != "Running":
        return RouterState(pod, None, pod.problem)
    try:
        return RouterState(pod, ask(cluster, pod), None)
    except RoutersUnreachable as error:
        return RouterState(pod, None, str(error).removeprefix(f"{pod.name}: "))


def _best(reports: Sequence[FleetReport]) -> FleetReport | None:
    """A router that has seen Redis knows more than one that has not."""
    return max(reports, key=lambda report: (report.is_ready, len(report.workers)), default=None)
