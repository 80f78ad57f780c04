"""What Pod and StatefulSet objects say, as far as operators want to know it. Pure; called by all.

The annotations' names are ``fleet_watch.annotations``'; a test holds them together (importing it
here would load Redis' client into every call of the plugin).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sangam_core.placement import Role
from sangam_router.kubectl.persist_plan import Debt, WorkerSet

ROLE_ANNOTATION = "sangam.io/role"
DRAIN_ANNOTATION = "sangam.io/drain"
BOOT_ROLE_LABEL = "sangam.io/boot-role"
OWES_ANNOTATION = "sangam.io/owes"
"""On a StatefulSet that ``rebalance --persist`` has shrunk: ``ROLE=COUNT``, see ``Debt``."""

INTERNAL_PORT = 8001


@dataclass(frozen=True, slots=True)
class PodInfo:
    """A pod of the release.

    Attributes:
        boot_role: of a worker; None where the label is missing or wrong.
        role_wish: the annotation as written, or None.
        problem: why it is not ready, in Kubernetes' words; empty when it is.
        internal_port: of a router.
    """

    name: str
    uid: str
    node: str
    phase: str
    is_ready: bool
    is_leaving: bool
    boot_role: Role | None
    role_wish: str | None
    is_drain_wished: bool
    problem: str
    internal_port: int

    @property
    def ordinal(self) -> int:
        """Its number in its StatefulSet, -1 without one."""
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdecimal() else -1

    @property
    def wished_role(self) -> str:
        """The role that it should have: the annotation's, else the boot role."""
        if self.role_wish is not None:
            return self.role_wish
        return self.boot_role.value if self.boot_role else ""


def pod_info(pod: Mapping[str, Any]) -> PodInfo:
    """Read a Pod object (JSON)."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    boot_role = labels.get(BOOT_ROLE_LABEL)
    is_leaving = bool(metadata.get("deletionTimestamp"))
    is_ready = not is_leaving and _condition(status, "Ready").get("status") == "True"
    return PodInfo(
        name=metadata["name"],
        uid=metadata["uid"],
        node=(pod.get("spec") or {}).get("nodeName") or "",
        phase=status.get("phase") or "Unknown",
        is_ready=is_ready,
        is_leaving=is_leaving,
        boot_role=Role(boot_role) if boot_role in set(Role) else None,
        role_wish=annotations.get(ROLE_ANNOTATION),
        is_drain_wished=annotations.get(DRAIN_ANNOTATION) == "true",
        problem="" if is_ready else _problem(status, is_leaving=is_leaving),
        internal_port=_internal_port(pod),
    )


def set_info(stateful_set: Mapping[str, Any]) -> WorkerSet | None:
    """Read a StatefulSet object (JSON); None where it has no boot role."""
    metadata = stateful_set["metadata"]
    role = (metadata.get("labels") or {}).get(BOOT_ROLE_LABEL)
    if role not in set(Role):
        return None
    owed_role, _, count = (
        (metadata.get("annotations") or {}).get(OWES_ANNOTATION, "").partition("=")
    )
    is_debt = owed_role in set(Role) and count.isdecimal()
    return WorkerSet(
        role=Role(role),
        name=metadata["name"],
        replicas=int((stateful_set.get("spec") or {}).get("replicas", 1)),
        debt=Debt(Role(owed_role), int(count)) if is_debt else None,
    )


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    for condition in status.get("conditions") or ():
        if condition.get("type") == kind:
            return dict(condition)
    return {}


def _problem(status: Mapping[str, Any], *, is_leaving: bool) -> str:
    if is_leaving:
        return "terminating"
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return f"Pending: {scheduled.get('message') or scheduled.get('reason') or 'unscheduled'}"
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        reason = waiting.get("reason") or ended.get("reason")
        if reason:
            message = waiting.get("message") or ended.get("message") or ""
            return f"{reason}: {message}".removesuffix(": ")
    phase = status.get("phase") or "Unknown"
    return "not ready yet" if phase == "Running" else phase


def _internal_port(pod: Mapping[str, Any]) -> int:
    for container in (pod.get("spec") or {}).get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == "internal":
                return int(port["containerPort"])
    return INTERNAL_PORT
