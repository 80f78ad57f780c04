"""Carries out ``drain`` and ``undrain``: annotates, waits until the worker is empty, or back.

The routers refuse to drain the last worker that decodes; that is said before anything is changed.
"""

from sangam_core.counted import counted
from sangam_core.errors import SangamError
from sangam_core.placement import Role
from sangam_router.kubectl.cluster import Cluster
from sangam_router.kubectl.fleet import FleetView, look
from sangam_router.kubectl.pods import DRAIN_ANNOTATION, PodInfo
from sangam_router.kubectl.progress import Progress
from sangam_router.kubectl.routers import WorkerReport


class DrainRefused(SangamError):
    """Draining this worker would stop the service."""


def drain(cluster: Cluster, name: str, progress: Progress, *, is_forced: bool) -> None:
    """Let a worker take no new blocks, and wait until it holds none.

    Args:
        is_forced: write the wish even where it would leave nobody to serve.

    Raises:
        DrainRefused: it is the last that decodes or prefills, or the routers refuse it.
    """
    view = look(cluster)
    pod = _pod(view, name)
    if not is_forced:
        _check_others_serve(view, pod)
    name = pod.name
    progress.insist(f"drain {name}", lambda: cluster.annotate(pod, DRAIN_ANNOTATION, "true"))

    def missing() -> str | None:
        worker, now = _worker(cluster, pod)
        if worker.refused is not None and worker.refused.is_drained and now.is_drain_wished:
            raise DrainRefused(
                f"the routers refuse to drain {name} ({worker.refused.reason}). The wish stands "
                "and is granted as soon as another worker decodes; "
                f"kubectl sangam undrain {name} takes it back"
            )
        if not (worker.is_drain_desired and worker.is_draining):
            return "the routers pass it on"
        if worker.is_empty:
            return None
        blocks, pages = counted(worker.num_blocks, "block"), counted(worker.used_pages, "page")
        return f"{blocks}, {pages} left"

    progress.wait(f"{name} is drained and holds no blocks", missing)


def undrain(cluster: Cluster, name: str, progress: Progress) -> None:
    """Let a worker take blocks again, and wait until it does."""
    pod = _pod(look(cluster), name)
    name = pod.name
    progress.insist(f"undrain {name}", lambda: cluster.annotate(pod, DRAIN_ANNOTATION, None))

    def missing() -> str | None:
        worker, _ = _worker(cluster, pod)
        is_refusal_shown = worker.refused is not None and worker.refused.is_drained
        if worker.is_drain_desired or worker.is_draining or is_refusal_shown:
            return "the routers pass it on"
        return None

    progress.wait(f"{name} takes blocks", missing)


def _pod(view: FleetView, name: str) -> PodInfo:
    name = name.removeprefix("pod/")
    pod = view.pod(name)
    if pod is None:
        known = ", ".join(each.name for each in view.pods) or "none"
        raise SangamError(f"no worker pod {name!r} in this release; there are: {known}")
    if pod.is_leaving:
        raise SangamError(f"{name} is terminating: it drains by itself")
    report = view.known_report()
    if not report.watcher.is_enabled:
        raise SangamError(
            "the routers do not follow the pods' annotations, so nothing would change: "
            "install with router.fleetWatcher.enabled=true"
        )
    if view.worker(pod) is None:
        raise SangamError(f"the routers do not know {name}: {pod.problem or 'not registered yet'}")
    return pod


def _worker(cluster: Cluster, pod: PodInfo) -> tuple[WorkerReport, PodInfo]:
    """A pod as it is now, and what the routers say of it."""
    view = look(cluster)
    view.known_report()
    now = view.pod(pod.name)
    if now is None or now.uid != pod.uid:
        raise SangamError(f"{pod.name} was replaced or deleted meanwhile")
    worker = view.worker(pod)
    if worker is None:
        raise SangamError(f"{pod.name} has left the routers' fleet meanwhile")
    return worker, now


def _check_others_serve(view: FleetView, pod: PodInfo) -> None:
    this = view.worker(pod)
    assert this is not None
    others = [
        Role(worker.role)
        for worker in view.known_report().workers
        if worker.worker_id != pod.uid and not worker.is_draining and not worker.is_drain_desired
    ]
    role = Role(this.role)
    if role.can_decode and not any(other.can_decode for other in others):
        raise DrainRefused(
            f"{pod.name} is the last worker that decodes: answers would never end, and the routers "
            "would refuse it. Move another one first (kubectl sangam rebalance), or leave the wish "
            "standing with --force"
        )
    if role.can_prefill and not any(other.can_prefill for other in others):
        raise DrainRefused(
            f"{pod.name} is the last worker that prefills: no answer could begin. Move another one "
            "first (kubectl sangam rebalance), or drain it all the same with --force"
        )
