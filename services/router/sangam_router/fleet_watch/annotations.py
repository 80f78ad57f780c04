"""What a worker pod's metadata says that an operator wants. Pure; called by ``watcher``."""

from collections.abc import Mapping
from typing import Any

from sangam_core.placement import Role
from sangam_router.ledger.desires import Wish

ROLE_ANNOTATION = "sangam.io/role"
DRAIN_ANNOTATION = "sangam.io/drain"
BOOT_ROLE_LABEL = "sangam.io/boot-role"

_DRAIN_WORDS = {"true": True, "false": False, "": False}


def wish_of(pod: Mapping[str, Any]) -> Wish | None:
    """The wish in a pod's metadata; without the role annotation it is the boot role.

    None for a pod that is going away, and for one without a boot role: it is no worker.

    Args:
        pod: a Pod object of the API, as JSON.
    """
    metadata = pod.get("metadata") or {}
    labels = metadata.get("labels") or {}
    annotations = metadata.get("annotations") or {}
    boot_role = labels.get(BOOT_ROLE_LABEL)
    if metadata.get("deletionTimestamp") or boot_role not in set(Role):
        return None
    role = annotations.get(ROLE_ANNOTATION, boot_role)
    drain = annotations.get(DRAIN_ANNOTATION, "")
    return Wish(
        worker_id=metadata["uid"],
        name=metadata.get("name", ""),
        version=str(metadata.get("resourceVersion", "0")),
        boot_role=Role(boot_role),
        role=role,
        is_drained=_DRAIN_WORDS.get(drain, False),
        objection=_objection(role, drain),
    )


def _objection(role: str, drain: str) -> str:
    if role not in set(Role):
        return "unknown_role"
    return "" if drain in _DRAIN_WORDS else "unknown_drain"
