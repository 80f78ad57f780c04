"""Carries out ``rebalance``: plans, changes one thing at a time, waits for it, verifies the end.

What changes and in which order is ``plan``'s and ``persist_plan``'s. Every run starts from the
fleet as it is, so an interrupted one is taken up by running it again.
"""

from sangam_core.counted import counted
from sangam_core.errors import SangamError
from sangam_core.placement import Role
from sangam_router.kubectl.cluster import Cluster
from sangam_router.kubectl.fleet import FleetView, look, planned_workers, standing_role
from sangam_router.kubectl.persist_plan import Grow, Settle, Shrink, Step, num_owed, plan_persist
from sangam_router.kubectl.plan import Flip, check_total, plan_flips
from sangam_router.kubectl.pods import ROLE_ANNOTATION, PodInfo
from sangam_router.kubectl.progress import Progress
from sangam_router.kubectl.splits import Split, SplitImpossible, split_of


class FleetChanged(SangamError):
    """Somebody else changed the fleet meanwhile; the text says what."""


class Rebalance:
    """One run of the command."""

    def __init__(self, cluster: Cluster, progress: Progress) -> None:
        self._cluster, self._progress = cluster, progress

    def run(self, split: Split, *, is_persistent: bool, is_dry_run: bool) -> None:
        """Make the fleet ``split``.

        Raises:
            SplitImpossible: it cannot be, as the fleet is.
            SangamError: the cluster or the routers fail, or something takes too long.
        """
        steps = self._plan(split, is_persistent=is_persistent)
        if is_dry_run:
            for number, step in enumerate(steps, 1):
                self._progress.tell(f"{number}. {step}")
            self._progress.tell(
                f"dry run: {counted(len(steps), 'step')} to {split}, nothing was changed"
            )
            return
        if steps:
            self._settle_roles()
        for number, step in enumerate(steps, 1):
            self._carry_out(step, f"[{number}/{len(steps)}] {step}")
        self._verify(split, has_changed=bool(steps))

    # -- planning ---------------------------------------------------------------------------

    def _plan(self, split: Split, *, is_persistent: bool) -> tuple[Step, ...]:
        view = look(self._cluster)
        watcher = view.known_report().watcher
        if not watcher.is_enabled:
            raise SplitImpossible(
                "the routers do not follow the pods' annotations, so no role would change: "
                "install with router.fleetWatcher.enabled=true"
            )
        if not is_persistent:
            pods = view.staying
            if num_owed(self._cluster.sets()):
                raise SplitImpossible(
                    "an interrupted rebalance --persist still owes a pod: "
                    "finish it first, with --persist"
                )
            _check_ready(view, pods, len(pods), split)
            return plan_flips(planned_workers(view, pods), split)
        sets = self._cluster.sets()
        counts = {each.role: each.replicas for each in sets}
        # A pod that its set has already given up takes a moment to begin to leave.
        kept = [
            pod
            for pod in view.staying
            if pod.boot_role is not None and pod.ordinal < counts.get(pod.boot_role, 0)
        ]
        num_expected = sum(counts.values())
        _check_ready(view, kept, num_expected, split, num_owed=num_owed(sets))
        return plan_persist(planned_workers(view, kept), sets, split)

    def _settle_roles(self) -> None:
        """Let switches that are under way end: plans rest on what workers are about to be."""

        def missing() -> str | None:
            view = look(self._cluster)
            view.known_report()
            for pod in view.staying:
                worker = view.worker(pod)
                if worker is not None and standing_role(pod, worker) is not Role(worker.role):
                    return f"{pod.name} is still {worker.role}, {pod.wished_role} is asked of it"
            return None

        if missing() is not None:
            self._progress.wait("earlier changes", missing)

    # -- carrying out -----------------------------------------------------------------------

    def _carry_out(self, step: Step, what: str) -> None:
        if isinstance(step, Flip):
            self._flip(step, what)
        elif isinstance(step, Shrink):
            self._shrink(step, what)
        elif isinstance(step, Grow):
            self._grow(step, what)
        elif isinstance(step, Settle):
            self._progress.insist(what, lambda: self._cluster.settle(step.donor))
            self._progress.tell(what)

    def _flip(self, flip: Flip, what: str) -> None:
        changed: list[PodInfo] = []

        def change() -> None:
            pod = next((pod for pod in self._cluster.pods("worker") if pod.name == flip.pod), None)
            if pod is None or pod.is_leaving:
                raise FleetChanged(f"{flip.pod} is gone; run the command again")
            self._cluster.annotate(pod, ROLE_ANNOTATION, flip.annotation)
            changed.append(pod)

        self._progress.insist(what, change)
        self._progress.wait(what, lambda: self._lacks_role(changed[0], flip.after))

    def _shrink(self, step: Shrink, what: str) -> None:
        def change() -> None:
            self._check_count(step)
            self._cluster.scale(step.set_name, step.after, step.debt)

        def missing() -> str | None:
            if any(pod.name == step.pod for pod in self._cluster.pods("worker")):
                return f"{step.pod} finishes its blocks and leaves"
            return None

        self._progress.insist(what, change)
        self._progress.wait(what, missing)

    def _grow(self, step: Grow, what: str) -> None:
        def change() -> None:
            self._check_count(step)
            self._cluster.scale(step.set_name, step.after, None)
            self._cluster.settle(step.donor)

        def missing() -> str | None:
            view = look(self._cluster)
            pod = view.pod(step.pod)
            if pod is None:
                return f"{step.pod} is not there yet"
            if not pod.is_ready:
                return f"{step.pod}: {pod.problem}"
            return self._lacks_role(pod, step.role)

        self._progress.insist(what, change)
        self._progress.wait(what, missing)

    def _lacks_role(self, pod: PodInfo, role: Role) -> str | None:
        view = look(self._cluster)
        view.known_report()
        now = view.pod(pod.name)
        if now is None or now.uid != pod.uid or now.is_leaving:
            raise FleetChanged(f"{pod.name} was replaced or deleted; run the command again")
        worker = view.worker(pod)
        if worker is None:
            return f"{pod.name} is not registered"
        if worker.role != role.value:
            if worker.refused is not None and worker.refused.role == now.wished_role:
                return f"the routers refuse it for now ({worker.refused.reason})"
            return f"{pod.name} finishes its blocks as a {worker.role} worker"
        if worker.is_draining and not now.is_drain_wished:
            return f"{pod.name} takes no blocks yet"
        return None

    def _check_count(self, step: Shrink | Grow) -> None:
        """``after`` is fine: the change was made, and only its answer was lost."""
        for each in self._cluster.sets():
            if each.role is step.role and each.replicas not in (step.before, step.after):
                raise FleetChanged(
                    f"{each.name} has {each.replicas} replicas instead of {step.before}: somebody "
                    "else scales it; run the command again when that is done"
                )

    def _verify(self, split: Split, *, has_changed: bool) -> None:
        def missing() -> str | None:
            view = look(self._cluster)
            view.known_report()
            workers = [view.worker(pod) for pod in view.staying]
            roles = [Role(worker.role) for worker in workers if worker is not None]
            now = split_of(roles)
            return None if now == split else f"the routers see {now or 'nobody'}"

        if not has_changed and missing() is None:
            self._progress.tell(f"the fleet is {split} already: nothing to do")
            return
        self._progress.wait(f"the routers see {split}", missing)


def _check_ready(
    view: FleetView, pods: list[PodInfo], num_expected: int, split: Split, *, num_owed: int = 0
) -> None:
    """Refuse a split of another number of pods, and one with pods that cannot take part.

    Args:
        num_owed: pods of an interrupted rebalance, still to be made by this one.
    """
    check_total(num_expected + num_owed, split)
    problems = []
    for pod in pods:
        if pod.boot_role is None:
            problems.append(f"{pod.name}: no label sangam.io/boot-role")
        elif not pod.is_ready:
            problems.append(f"{pod.name}: {pod.problem}")
        elif view.worker(pod) is None:
            problems.append(f"{pod.name}: the routers do not know it (yet)")
    if len(pods) < num_expected:
        problems.append(f"{counted(num_expected - len(pods), 'pod')} not there yet")
    if problems:
        num_ready = len(pods) - sum(1 for problem in problems if ": " in problem)
        raise SplitImpossible(
            f"not enough pods are ready: {num_ready} of {num_expected} ({'; '.join(problems)})"
        )
