"""Which workers change their role, and in which order, so that one that decodes is always left.

Pure: workers and a split in, flips out, the same every time. Does not wait or verify
(``rebalance``), and knows nothing of StatefulSets (``persist_plan``). Flips are carried out one
after the other, each waited for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sangam_core.counted import counted
from sangam_core.placement import Role
from sangam_router.kubectl.splits import ROLES, Split, SplitImpossible, split_of


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker pod, as far as a plan needs it.

    Attributes:
        name: the pod's. ordinal: its number in its StatefulSet.
        boot_role: what it starts as.
        role: what it is, or is becoming; a refused wish does not count.
        annotation: the role that its annotation asks for, as written.
        load: o_w in tokens, blocks held, pages used; smaller is less loaded.
    """

    name: str
    ordinal: int
    boot_role: Role
    role: Role
    annotation: str | None = None
    is_drained: bool = False
    load: tuple[int, int, int] = (0, 0, 0)

    def serves_as(self, role: Role) -> "Worker":
        """The same worker after a flip."""
        return replace(self, role=role, annotation=annotation_for(self.boot_role, role))


@dataclass(frozen=True, slots=True)
class Flip:
    """One change of one pod's annotation.

    Attributes:
        before, after: the roles; the same where only a stale annotation is put right.
        annotation: what is written; None removes it.
    """

    pod: str
    before: Role
    after: Role
    annotation: str | None

    @property
    def is_tidying(self) -> bool:
        """Whether the worker keeps its role."""
        return self.before is self.after

    def __str__(self) -> str:
        if self.is_tidying:
            return f"{self.pod}: stays {self.after.value}, its stale annotation goes"
        return f"{self.pod}: {self.before.value} -> {self.after.value}"


def annotation_for(boot_role: Role, role: Role) -> str | None:
    """The annotation that makes a worker of ``boot_role`` a ``role``; None: without one."""
    return None if role is boot_role else role.value


def plan_flips(workers: Sequence[Worker], split: Split) -> tuple[Flip, ...]:
    """The fewest flips from the fleet as it is to ``split``, the least loaded workers first.

    Raises:
        SplitImpossible: the sum is not the fleet's, or only drained workers would decode.
    """
    check_total(len(workers), split)
    return ordered_flips(workers, _targets(workers, split))


def check_total(num_workers: int, split: Split) -> None:
    """Refuse a split of another number of workers."""
    if split.total != num_workers:
        raise SplitImpossible(
            f"{split} makes {counted(split.total, 'worker')}, but the fleet has {num_workers}: "
            "the counts must add up to it (kubectl scale changes how many there are)"
        )


def ordered_flips(workers: Sequence[Worker], targets: Mapping[str, Role]) -> tuple[Flip, ...]:
    """The flips that give every worker its target role.

    First annotations that no longer say what a worker is (a refused wish would be granted later),
    then workers that begin to decode, then those that go on decoding, at last those that stop: so
    the number that decode never falls below the smaller of now and then.

    Raises:
        SplitImpossible: nobody that takes blocks would decode.
    """
    if not any(targets[worker.name].can_decode and not worker.is_drained for worker in workers):
        raise SplitImpossible(
            "every worker that would decode is drained: undrain one first (kubectl sangam undrain)"
        )
    flips = []
    for worker in workers:
        target = targets[worker.name]
        annotation = annotation_for(worker.boot_role, target)
        if target is not worker.role or annotation != worker.annotation:
            flips.append((_turn(worker, target), worker, target, annotation))
    flips.sort(key=lambda flip: (flip[0], flip[1].is_drained, flip[1].load, flip[1].name))
    return tuple(
        Flip(worker.name, worker.role, target, annotation)
        for _, worker, target, annotation in flips
    )


def _turn(worker: Worker, target: Role) -> int:
    if target is worker.role:
        return 0
    if target.can_decode and not worker.role.can_decode:
        return 1
    return 2 if target.can_decode else 3


def _targets(workers: Sequence[Worker], split: Split) -> dict[str, Role]:
    """Everyone keeps its role but as many of each as are too many."""
    now = split_of([worker.role for worker in workers])
    surplus = {role: max(0, now.of(role) - split.of(role)) for role in ROLES}
    needs = {role: max(0, split.of(role) - now.of(role)) for role in ROLES}
    targets = {worker.name: worker.role for worker in workers}
    targets |= fill(workers, needs, surplus)
    return targets


def fill(
    workers: Iterable[Worker], needs: Mapping[Role, int], surplus: Mapping[Role, int]
) -> dict[str, Role]:
    """Choose who takes the roles that are wanted.

    Args:
        needs: workers wanted by role. surplus: how many workers of each role may be taken.
    """
    left, free = dict(surplus), list(workers)
    chosen: dict[str, Role] = {}
    # Prefill workers first: they take the drained ones, which leaves more that decode.
    for role in ROLES:
        for _ in range(needs[role]):
            candidates = [worker for worker in free if left.get(worker.role, 0)]
            best = min(candidates, key=lambda worker: _preference(worker, role))
            free.remove(best)
            left[best.role] -= 1
            chosen[best.name] = role
    return chosen


def _preference(worker: Worker, role: Role) -> tuple[bool, tuple[int, int, int], bool, int, str]:
    """Least loaded first; among equals one that comes home, then the highest ordinal."""
    is_wrongly_drained = worker.is_drained is role.can_decode
    is_away = worker.boot_role is not role
    return (is_wrongly_drained, worker.load, is_away, -worker.ordinal, worker.name)
