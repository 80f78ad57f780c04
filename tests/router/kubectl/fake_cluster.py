"""A small API server over real HTTP, in a thread: pods, sets, patches, port-forwards to routers.

Plays the controllers, the watcher and the workers as well: a scaled set gets and loses pods at
once, an annotated pod takes its role unless nobody would decode any more.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import WSMsgType, web

from sangam_core.placement import Role
from sangam_router.kubectl.pods import BOOT_ROLE_LABEL, DRAIN_ANNOTATION, ROLE_ANNOTATION

_DATA, _ERROR = b"\x00", b"\x01"


class FakeCluster:
    """A namespace with releases of Sangam.

    Attributes:
        dead_routers: pods whose port-forward fails. fail_requests: so many next ones get a 503.
        held_blocks: blocks that a worker holds, by pod name; one goes with each look.
        patches: what was changed, in order.
        is_watching: whether routers follow the pods. remark: what they say of the fleet.
        misfits: workers that they cannot use. max_sequence_tokens: of every worker.
    """

    def __init__(self) -> None:
        self.url = ""
        self.pods: dict[str, dict[str, Any]] = {}
        self.sets: dict[str, dict[str, Any]] = {}
        self.roles: dict[str, str] = {}
        self.held_blocks: dict[str, int] = {}
        self.unschedulable: set[str] = set()
        self.dead_routers: set[str] = set()
        self.fail_requests = 0
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.is_watching = True
        self.remark: str | None = None
        self.misfits: list[dict[str, Any]] = []
        self.max_sequence_tokens = 4096
        self.asked: list[str] = []

    def add_release(self, release: str = "sangam", **counts: int) -> None:
        """Sets with their pods, and two routers."""
        for role in Role:
            name = f"{release}-{role.value}"
            labels = _labels(release, "worker") | {BOOT_ROLE_LABEL: role.value}
            self.sets[name] = {
                "metadata": {"name": name, "labels": labels, "annotations": {}},
                "spec": {"replicas": counts.get(role.value, 0)},
            }
            self._reconcile(name)
        for number in range(2):
            pod = _pod(f"{release}-router-{number}", _labels(release, "router"))
            pod["spec"]["containers"][0]["ports"] = [{"name": "internal", "containerPort": 8001}]
            self.pods[pod["metadata"]["name"]] = pod

    def annotations(self, pod: str) -> dict[str, str]:
        """A pod's annotations."""
        found: dict[str, str] = self.pods[pod]["metadata"]["annotations"]
        return found

    # -- the API ----------------------------------------------------------------------------

    @web.middleware
    async def fail(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """The next requests get a 503."""
        if self.fail_requests:
            self.fail_requests -= 1
            return web.json_response({"message": "not today"}, status=503)
        response: web.StreamResponse = await handler(request)
        return response

    async def list_pods(self, request: web.Request) -> web.Response:
        return _listed(self.pods, request)

    async def list_sets(self, request: web.Request) -> web.Response:
        return _listed(self.sets, request)

    async def patch(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        found = self.pods.get(name) or self.sets.get(name)
        if found is None:
            return web.json_response({"message": f"{name} not found"}, status=404)
        assert request.content_type == "application/merge-patch+json"
        self.patches.append((name, body))
        metadata = body.get("metadata", {})
        if metadata.get("uid", found["metadata"].get("uid")) != found["metadata"].get("uid"):
            return web.json_response({"message": "uid conflict"}, status=409)
        for key, value in metadata.get("annotations", {}).items():
            if value is None:
                found["metadata"]["annotations"].pop(key, None)
            else:
                found["metadata"]["annotations"][key] = value
        found["spec"] |= body.get("spec", {})
        if name in self.sets:
            self._reconcile(name)
        return web.json_response(found)

    async def forward(self, request: web.Request) -> web.WebSocketResponse:
        """One HTTP exchange over a port-forward, as the kubelet's port 8001 would have it."""
        name = request.match_info["name"]
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        port = int(request.query["ports"]).to_bytes(2, "little")
        for channel in (_DATA, _ERROR):
            await socket.send_bytes(channel + port)
        if name in self.dead_routers:
            await socket.send_bytes(_ERROR + b"connection refused")
            return socket
        async for message in socket:
            if message.type is WSMsgType.BINARY and b"\r\n\r\n" in message.data:
                self.asked.append(name)
                body = json.dumps(self.fleet()).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                # In two pieces, as networks do.
                await socket.send_bytes(_DATA + head + body[:10])
                await socket.send_bytes(_DATA + body[10:])
        return socket

    # -- what routers and workers would do -----------------------------------------------------

    def fleet(self) -> dict[str, Any]:
        """``/admin/fleet``: every look lets wishes apply and a block finish."""
        workers = []
        for name, pod in self.pods.items():
            if BOOT_ROLE_LABEL not in pod["metadata"]["labels"] or name in self.unschedulable:
                continue
            workers.append(self._worker(name, pod))
        return {
            "is_ready": True,
            "problem": None,
            "remark": self.remark,
            "workers": workers,
            "incompatible_workers": self.misfits,
            "watcher": {"is_enabled": self.is_watching, "is_synced": self.is_watching},
            "waiting": {"num_prefills": 3, "num_decodes": 1},
            "a_field_of_a_newer_version": 1,
        }

    def _worker(self, name: str, pod: dict[str, Any]) -> dict[str, Any]:
        annotations = pod["metadata"]["annotations"]
        boot = pod["metadata"]["labels"][BOOT_ROLE_LABEL]
        wish = annotations.get(ROLE_ANNOTATION, boot)
        is_drained = annotations.get(DRAIN_ANNOTATION) == "true"
        refused = self._objection(name, wish, is_drained=is_drained)
        if refused is None:
            self.roles[name] = wish
        blocks = self.held_blocks.get(name, 0)
        self.held_blocks[name] = max(0, blocks - is_drained)
        return {
            "worker_id": pod["metadata"]["uid"],
            "name": name,
            "role": self.roles.get(name, boot),
            "desired_role": self.roles.get(name, boot),
            "is_draining": is_drained and refused is None,
            "is_drain_desired": is_drained and refused is None,
            "refused": refused,
            "outstanding_prefill_tokens": 100 * blocks,
            "free_pages": 64 - blocks,
            "total_pages": 64,
            "max_sequence_tokens": self.max_sequence_tokens,
            "num_running": blocks,
            "version": "9.9",
        }

    def _objection(self, name: str, wish: str, *, is_drained: bool) -> dict[str, Any] | None:
        reason = ""
        if wish not in set(Role):
            reason = "unknown_role"
        elif wish == Role.PREFILL or is_drained:
            now = self.roles.get(name, "")
            others = [
                role
                for other, role in self.roles.items()
                if other != name and self.annotations(other).get(DRAIN_ANNOTATION) != "true"
            ]
            if now not in ("", "prefill") and not {"decode", "colocated"} & {*others}:
                reason = "last_decode_worker"
        if not reason:
            return None
        return {"role": wish, "is_drained": is_drained, "reason": reason}

    def _reconcile(self, name: str) -> None:
        each = self.sets[name]
        labels, replicas = each["metadata"]["labels"], each["spec"]["replicas"]
        for ordinal in range(replicas):
            pod_name = f"{name}-{ordinal}"
            if pod_name not in self.pods:
                self.pods[pod_name] = _pod(pod_name, dict(labels))
                self.roles[pod_name] = labels[BOOT_ROLE_LABEL]
        for pod_name in [*self.pods]:
            set_name, _, ordinal_text = pod_name.rpartition("-")
            if set_name == name and int(ordinal_text) >= replicas:
                del self.pods[pod_name]
                self.roles.pop(pod_name, None)

    def make_unschedulable(self, pod: str, reason: str) -> None:
        """The scheduler finds no node for a pod."""
        self.unschedulable.add(pod)
        self.pods[pod]["status"] = {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "message": reason}],
        }


def _labels(release: str, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "sangam",
        "app.kubernetes.io/instance": release,
        "app.kubernetes.io/component": component,
    }


def _pod(name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-of-{name}", "labels": labels, "annotations": {}},
        "spec": {"nodeName": "node-0", "containers": [{"name": "main"}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def _listed(items: dict[str, dict[str, Any]], request: web.Request) -> web.Response:
    wanted = dict(part.split("=") for part in request.query["labelSelector"].split(","))
    found = [
        item for item in items.values() if wanted.items() <= item["metadata"]["labels"].items()
    ]
    return web.json_response({"items": found})


def write_kubeconfig(folder: Path, url: str, namespace: str = "serving") -> Path:
    """A kubeconfig whose only context names the server and a namespace."""
    path = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}}
        ],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def a_fake_cluster(**counts: int) -> Iterator[FakeCluster]:
    """A cluster on loopback with one release of so many workers by role; none: without one."""
    cluster = FakeCluster()
    if counts:
        cluster.add_release(**counts)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        app = web.Application(middlewares=[cluster.fail])
        core, apps = "/api/v1/namespaces/serving", "/apis/apps/v1/namespaces/serving"
        app.router.add_get(f"{core}/pods", cluster.list_pods)
        app.router.add_patch(f"{core}/pods/{{name}}", cluster.patch)
        app.router.add_get(f"{core}/pods/{{name}}/portforward", cluster.forward)
        app.router.add_get(f"{apps}/statefulsets", cluster.list_sets)
        app.router.add_patch(f"{apps}/statefulsets/{{name}}", cluster.patch)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        cluster.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield cluster
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
