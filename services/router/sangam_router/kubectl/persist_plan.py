"""How ``rebalance --persist`` makes a split last: pods move from set to set, one at a time.

Pure. A StatefulSet removes its highest ordinal, so the pods that will go take the wanted roles
first (flips, as without ``--persist``) and those that stay return to the roles they boot in. Then,
pod by pod, the donor's set shrinks and the receiver's grows: the pool of GPUs may be full, so never
the other way round. Where the pod that goes is the only one that prefills or decodes, another one
bridges the gap as a colocated worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sangam_core.placement import Role
from sangam_router.kubectl.plan import (
    Flip,
    Worker,
    annotation_for,
    check_total,
    fill,
    ordered_flips,
)
from sangam_router.kubectl.splits import ROLES, Split, SplitImpossible


@dataclass(frozen=True, slots=True)
class Debt:
    """A donor has shrunk: until ``role``'s set has ``count`` pods, one is owed to it.

    Kept as an annotation of the donor (written with its new count in one request), so that an
    interrupted rebalance can be taken up again.
    """

    role: Role
    count: int

    def __str__(self) -> str:
        return f"{self.role.value}={self.count}"


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """A role's StatefulSet: its name, its count, and what it owes."""

    role: Role
    name: str
    replicas: int
    debt: Debt | None = None


@dataclass(frozen=True, slots=True)
class Shrink:
    """Take the highest ordinal, ``pod``, from a set, and note whom it is owed to."""

    role: Role
    set_name: str
    before: int
    pod: str
    debt: Debt

    @property
    def after(self) -> int:
        """The new count."""
        return self.before - 1

    def __str__(self) -> str:
        return f"{self.set_name}: {self.before} -> {self.after}, {self.pod} goes"


@dataclass(frozen=True, slots=True)
class Grow:
    """Add ``pod`` to a set, and then forget what ``donor`` owed."""

    role: Role
    set_name: str
    before: int
    pod: str
    donor: str

    @property
    def after(self) -> int:
        """The new count."""
        return self.before + 1

    def __str__(self) -> str:
        return f"{self.set_name}: {self.before} -> {self.after}, {self.pod} comes"


@dataclass(frozen=True, slots=True)
class Settle:
    """Forget a debt that has been paid."""

    donor: str

    def __str__(self) -> str:
        return f"{self.donor}: nothing is owed any more"


Step = Flip | Shrink | Grow | Settle


def num_owed(sets: Sequence[WorkerSet]) -> int:
    """Pods that an interrupted rebalance has taken and not yet given back."""
    counts = {each.role: each.replicas for each in sets}
    return sum(
        1 for each in sets if each.debt is not None and counts[each.debt.role] < each.debt.count
    )


def plan_persist(
    workers: Sequence[Worker], sets: Sequence[WorkerSet], split: Split
) -> tuple[Step, ...]:
    """All steps from the fleet as it is to boot roles that make ``split``, without annotations.

    Args:
        workers: the pods that exist; of every set the ordinals below its count.

    Raises:
        SplitImpossible: the sum is not the fleet's, a set is missing, or a lone worker would have
            to be replaced.
    """
    by_role = {each.role: each for each in sets}
    missing = [role.value for role in ROLES if role not in by_role and split.of(role)]
    if missing:
        raise SplitImpossible(f"there is no StatefulSet for the role {', '.join(missing)}")
    fleet = {worker.name: worker for worker in workers}
    plan = _PersistPlan(by_role, fleet, split)
    plan.pay_debts()
    check_total(sum(plan.counts.values()), split)
    plan.flip()
    plan.move()
    return tuple(plan.steps)


class _PersistPlan:
    """The plan so far, and the fleet as it will be then."""

    def __init__(
        self, sets: Mapping[Role, WorkerSet], fleet: dict[str, Worker], split: Split
    ) -> None:
        self._sets, self._fleet, self._split = sets, fleet, split
        self.counts = {role: each.replicas for role, each in sets.items()}
        self.steps: list[Step] = []

    def pay_debts(self) -> None:
        for each in self._sets.values():
            if each.debt is None:
                continue
            if self.counts[each.debt.role] < each.debt.count:
                self._grow(each.debt.role, donor=each.name)
            else:
                self.steps.append(Settle(each.name))

    def flip(self) -> None:
        """The pods that stay take their boot roles, the others what their sets cannot give yet."""
        going = [worker for worker in self._fleet.values() if self._is_going(worker)]
        needs = {role: max(0, self._split.of(role) - self.counts.get(role, 0)) for role in ROLES}
        targets = {name: worker.boot_role for name, worker in self._fleet.items()}
        for worker in sorted(going, key=lambda worker: (worker.load, worker.name)):
            if needs[worker.role]:
                needs[worker.role] -= 1
                targets[worker.name] = worker.role
                going.remove(worker)
        targets |= fill(going, needs, {role: len(going) for role in ROLES})
        for flip in ordered_flips([*self._fleet.values()], targets):
            self._flip(flip)

    def move(self) -> None:
        """One pod after the other leaves its donor's set and is replaced in the receiver's."""
        for donor in ROLES:
            while self.counts.get(donor, 0) > self._split.of(donor):
                self._replace_highest(donor)

    def _replace_highest(self, donor: Role) -> None:
        last = self._name(donor, self.counts[donor] - 1)
        receiver = self._fleet[last].role
        bridge = self._bridge(last)
        if bridge is not None:
            self._flip(_flip_of(bridge, Role.COLOCATED))
        debt = Debt(receiver, self.counts[receiver] + 1)
        donor_set = self._sets[donor]
        self.steps.append(Shrink(donor, donor_set.name, self.counts[donor], last, debt))
        self.counts[donor] -= 1
        del self._fleet[last]
        self._grow(receiver, donor=donor_set.name)
        if bridge is not None:
            self._flip(_flip_of(self._fleet[bridge.name], bridge.role))

    def _bridge(self, leaving: str) -> Worker | None:
        """Who must become colocated while ``leaving`` is replaced; None where nobody need."""
        rest = [
            worker
            for name, worker in self._fleet.items()
            if name != leaving and not worker.is_drained
        ]
        is_served = any(worker.role.can_decode for worker in rest) and any(
            worker.role.can_prefill for worker in rest
        )
        if is_served:
            return None
        if not rest:
            raise SplitImpossible(
                f"{leaving} is the only worker that takes blocks: replacing it would leave nobody "
                "to serve (without --persist its role changes in place)"
            )
        return min(rest, key=lambda worker: (self._is_going(worker), worker.load, worker.name))

    def _grow(self, role: Role, *, donor: str) -> None:
        before = self.counts[role]
        pod = self._name(role, before)
        self.steps.append(Grow(role, self._sets[role].name, before, pod, donor))
        self.counts[role] += 1
        self._fleet[pod] = Worker(pod, before, role, role)

    def _flip(self, flip: Flip) -> None:
        self.steps.append(flip)
        self._fleet[flip.pod] = self._fleet[flip.pod].serves_as(flip.after)

    def _is_going(self, worker: Worker) -> bool:
        return worker.ordinal >= self._split.of(worker.boot_role)

    def _name(self, role: Role, ordinal: int) -> str:
        return f"{self._sets[role].name}-{ordinal}"


def _flip_of(worker: Worker, role: Role) -> Flip:
    return Flip(worker.name, worker.role, role, annotation_for(worker.boot_role, role))
