"""Fleets for planning tests: drawn at random, or written down; and what a plan makes of one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from sangam_core.placement import Role
from sangam_router.kubectl.persist_plan import Grow, Settle, Shrink, Step, WorkerSet
from sangam_router.kubectl.plan import Flip, Worker, annotation_for
from sangam_router.kubectl.splits import ROLES, Split


def a_worker(name: str = "sangam-prefill-0", role: Role | None = None, **changes: object) -> Worker:
    """A worker that is what it boots as, by its name."""
    _, boot, ordinal = name.rsplit("-", 2)
    worker = Worker(name, int(ordinal), Role(boot), Role(boot))
    if role is not None:
        worker = worker.serves_as(role)
    return replace(worker, **changes)  # type: ignore[arg-type]


def a_fleet(*, prefill: int = 0, decode: int = 0, colocated: int = 0) -> list[Worker]:
    """Workers in their boot roles."""
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.COLOCATED: colocated}
    return [
        a_worker(f"sangam-{role.value}-{ordinal}")
        for role, count in counts.items()
        for ordinal in range(count)
    ]


def sets_of(workers: Iterable[Worker]) -> list[WorkerSet]:
    """The StatefulSets of a fleet."""
    boots = [worker.boot_role for worker in workers]
    return [WorkerSet(role, f"sangam-{role.value}", boots.count(role)) for role in ROLES]


@st.composite
def fleets(draw: st.DrawFn, max_workers: int = 7, *, may_drain: bool = True) -> list[Worker]:
    """Any fleet: roles flipped, annotations stale, some drained, loads."""
    boots = draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=max_workers))
    seen = dict.fromkeys(ROLES, 0)
    workers = []
    for boot in boots:
        role = draw(st.sampled_from(ROLES))
        annotation = draw(st.sampled_from([annotation_for(boot, role), "prefill", "nonsense"]))
        workers.append(
            Worker(
                name=f"sangam-{boot.value}-{seen[boot]}",
                ordinal=seen[boot],
                boot_role=boot,
                role=role,
                annotation=annotation,
                is_drained=may_drain and draw(st.integers(0, 2)) == 0,
                load=(draw(st.integers(0, 3)), draw(st.integers(0, 2)), 0),
            )
        )
        seen[boot] += 1
    return workers


@st.composite
def splits(draw: st.DrawFn, total: int) -> Split:
    """Any split of a fleet that could serve."""
    prefill = draw(st.integers(0, total - 1))
    decode = draw(st.integers(0, total - prefill))
    colocated = total - prefill - decode
    if not colocated and not prefill:
        decode, colocated = 0, total
    return Split(prefill, decode, colocated)


def decodes(workers: Iterable[Worker]) -> bool:
    """Whether somebody takes blocks to decode."""
    return any(worker.role.can_decode and not worker.is_drained for worker in workers)


def prefills(workers: Iterable[Worker]) -> bool:
    """Whether somebody takes prefills."""
    return any(worker.role.can_prefill and not worker.is_drained for worker in workers)


class World:
    """Pods and sets as steps change them; refuses what a cluster would refuse."""

    def __init__(self, workers: Sequence[Worker], sets: Sequence[WorkerSet] = ()) -> None:
        self.fleet = {worker.name: worker for worker in workers}
        self.sets: dict[Role, WorkerSet] = {each.role: each for each in sets}

    def take(self, step: Step) -> None:
        if isinstance(step, Flip):
            worker = self.fleet[step.pod]
            assert worker.role is step.before
            self.fleet[step.pod] = replace(worker, role=step.after, annotation=step.annotation)
        elif isinstance(step, Shrink):
            each = self.sets[step.role]
            assert each.replicas == step.before
            assert step.pod == f"{each.name}-{step.after}"
            del self.fleet[step.pod]
            self.sets[step.role] = replace(each, replicas=step.after, debt=step.debt)
        elif isinstance(step, Grow):
            each = self.sets[step.role]
            assert each.replicas == step.before
            assert step.pod not in self.fleet
            assert step.pod == f"{each.name}-{step.before}"
            self.fleet[step.pod] = Worker(step.pod, step.before, step.role, step.role)
            self.sets[step.role] = replace(each, replicas=step.after)
            self._settle(step.donor)
        elif isinstance(step, Settle):
            self._settle(step.donor)

    def roles(self) -> Mapping[Role, int]:
        """How many workers there are by role."""
        roles = [worker.role for worker in self.fleet.values()]
        return {role: roles.count(role) for role in ROLES}

    def _settle(self, donor: str) -> None:
        for role, each in self.sets.items():
            if each.name == donor:
                self.sets[role] = replace(each, debt=None)
