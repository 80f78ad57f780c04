"""The release under test: installing, upgrading, what its fleet says, and whether it is at rest."""

import json
from typing import Any

from tests.cluster.kube import CommandFailed, get, helm, is_ready, kubectl, pods, wait_until
from tests.cluster.settings import CHART, CPU_VALUES, EXTRA_VALUES, image_flags

HOST = "sangam.test"

_FLEET = (
    "import json,urllib.request as u;"
    "print(u.urlopen('http://127.0.0.1:8001/admin/fleet',timeout=5).read().decode())"
)


class Release:
    """One Helm release of the chart."""

    def __init__(self, name: str = "sangam") -> None:
        self.name = name
        self.fullname = name if "sangam" in name else f"{name}-sangam"

    def upgrade(self, *flags: str, wait: bool = True, seconds: float = 240) -> str:
        """``helm upgrade --install`` with the tests' values, and ``flags``."""
        values = ["-f", str(CPU_VALUES), *(["-f", EXTRA_VALUES] if EXTRA_VALUES else [])]
        waiting = ["--wait", "--timeout", f"{seconds:.0f}s"] if wait else []
        return helm(
            *("upgrade", "--install", self.name, str(CHART), *values, *image_flags()),
            *(*flags, *waiting),
            seconds=seconds + 30,
        )

    def selector(self, component: str, role: str = "") -> str:
        """The label selector of a component's pods."""
        base = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        return f"{base},sangam.io/boot-role={role}" if role else base

    def pods(self, component: str, role: str = "") -> list[Any]:
        """A component's pods."""
        return pods(self.selector(component, role))

    def ready_pods(self, component: str, role: str = "") -> list[Any]:
        """Those that are ready."""
        return [pod for pod in self.pods(component, role) if is_ready(pod)]

    def wait_for_workers(self, count: int, seconds: float = 120) -> None:
        """Wait until exactly so many worker pods are there, ready, and in the fleet."""

        def is_met() -> bool:
            return (
                len(self.pods("worker")) == len(self.ready_pods("worker")) == count
                and len(self.workers()) == count
            )

        wait_until(is_met, f"{count} workers", seconds)

    def sets(self) -> dict[str, int]:
        """Replicas wanted by every StatefulSet of a role."""
        names = {f"{self.fullname}-{role}": role for role in ("prefill", "decode", "colocated")}
        return {
            names[each["metadata"]["name"]]: each["spec"]["replicas"]
            for each in get("statefulsets")
            if each["metadata"]["name"] in names
        }

    def fleet(self) -> dict[str, Any]:
        """``/admin/fleet`` of some router."""
        trouble = CommandFailed(["exec"], "no router is ready")
        for pod in self.ready_pods("router"):
            try:
                name = pod["metadata"]["name"]
                answer = json.loads(kubectl("exec", name, "--", "python", "-c", _FLEET, seconds=20))
                assert isinstance(answer, dict)
                return answer
            except CommandFailed as error:
                trouble = error
        raise trouble

    def workers(self) -> dict[str, dict[str, Any]]:
        """The fleet's workers by pod name."""
        return {worker["name"]: worker for worker in self.fleet()["workers"]}

    def roles(self) -> dict[str, str]:
        """Effective roles by pod name, of workers that take work."""
        return {
            name: worker["role"]
            for name, worker in self.workers().items()
            if not worker["is_draining"]
        }

    def wait_for_role(self, pod: str, role: str, seconds: float = 30) -> None:
        """Wait until a pod serves in a role."""
        wait_until(lambda: self.roles().get(pod) == role, f"{pod} is {role}", seconds)

    def wait_for_rest(self, seconds: float = 30) -> None:
        """Wait until nothing is reserved or waits: counters at 0, pages free in both books."""

        def is_at_rest() -> bool:
            fleet = self.fleet()
            waiting = fleet["waiting"]
            return not any(
                waiting[name] for name in ("num_prefills", "num_decodes", "pending_decode_pages")
            ) and all(
                worker["outstanding_prefill_tokens"] == 0
                and worker["free_pages"] == worker["total_pages"] == worker["free_pages_at_worker"]
                and worker["num_running"] == worker["num_waiting"] == 0
                for worker in fleet["workers"]
            )

        wait_until(is_at_rest, "counters at 0 and every page free", seconds)

    def uids(self, component: str) -> dict[str, str]:
        """Pods' UIDs by name."""
        return {p["metadata"]["name"]: p["metadata"]["uid"] for p in self.pods(component)}

    def wait_for_new_pods(
        self, component: str, before: dict[str, str], seconds: float = 240
    ) -> None:
        """Wait until none of these pods is left, and as many are ready."""

        def is_met() -> bool:
            ready = {p["metadata"]["uid"] for p in self.ready_pods(component)}
            return len(ready) >= len(before) and not ready & set(before.values())

        wait_until(is_met, f"every {component} pod anew", seconds)

    def uninstall(self) -> None:
        """Take it away, and wait for its pods to be gone."""
        helm("uninstall", self.name, "--wait", "--timeout", "180s", seconds=200)
        selector = f"app.kubernetes.io/instance={self.name}"
        wait_until(lambda: not get("pods", "", "-l", selector), f"{self.name} has no pods", 120)
