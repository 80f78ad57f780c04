"""A small API server over real HTTP: lists and watches pods, and fails on demand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


def a_pod(uid: str = "u1", version: int = 1, **changes: Any) -> dict[str, Any]:
    """A worker pod as the API gives it."""
    labels = {"sangam.io/boot-role": changes.pop("boot_role", "prefill")}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": changes.pop("name", f"sangam-{uid}"),
            "uid": uid,
            "resourceVersion": str(version),
            "labels": labels,
            "annotations": changes.pop("annotations", {}),
            **changes,
        },
    }


class FakeApiServer:
    """Pods with a history, as far as a watcher can tell.

    Attributes:
        num_lists, num_watches: requests served. lists_fail_with: a status, or None.
        odd_list: a body to answer lists with. do_watches_end: whether each ends at once, cleanly.
        is_silent: whether watches tell nothing and stay open.
        oldest_version: watches from before it get 410 (in the stream, as the real one may).
    """

    def __init__(self) -> None:
        self.url = ""
        self.version = 100
        self.num_lists = self.num_watches = 0
        self.lists_fail_with: int | None = None
        self.odd_list: object = None
        self.do_watches_end = self.is_silent = False
        self.oldest_version = 0
        self.queries: list[dict[str, str]] = []
        self._pods: dict[str, dict[str, Any]] = {}
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._cut = 0

    async def put(self, pod: dict[str, Any]) -> None:
        """Add or change a pod; it gets the next version."""
        uid = pod["metadata"]["uid"]
        kind = "MODIFIED" if uid in self._pods else "ADDED"
        self._pods[uid] = pod
        await self._happen(kind, pod)

    async def remove(self, uid: str) -> None:
        """Delete a pod."""
        await self._happen("DELETED", self._pods.pop(uid))

    async def bookmark(self) -> None:
        """Tell of a newer version and nothing else."""
        await self._happen("BOOKMARK", {"kind": "Pod", "metadata": {}})

    async def spoil(self) -> None:
        """Tell of something that is no pod."""
        async with self._changed:
            self.version += 1
            self._history.append((self.version, {"type": "MODIFIED", "object": {}}))
            self._changed.notify_all()

    async def cut(self) -> None:
        """Break every watch off, without a word."""
        async with self._changed:
            self._cut += 1
            self._changed.notify_all()

    async def _happen(self, kind: str, pod: dict[str, Any]) -> None:
        async with self._changed:
            self.version += 1
            pod["metadata"]["resourceVersion"] = str(self.version)
            self._history.append(
                (self.version, {"type": kind, "object": json.loads(json.dumps(pod))})
            )
            self._changed.notify_all()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if request.query.get("watch"):
            return await self._watch(request)
        self.num_lists += 1
        if self.lists_fail_with is not None:
            body = {"kind": "Status", "code": self.lists_fail_with, "message": "not today"}
            return web.json_response(body, status=self.lists_fail_with)
        if self.odd_list is not None:
            return web.json_response(self.odd_list)
        body = {
            "kind": "PodList",
            "metadata": {"resourceVersion": str(self.version)},
            "items": [*self._pods.values()],
        }
        return web.json_response(body)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.num_watches += 1
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        if seen < self.oldest_version:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        cut = self._cut
        while not self.do_watches_end:
            is_told = not self.is_silent
            news = [event for version, event in self._history if version > seen and is_told]
            for event in news:
                await response.write(json.dumps(event).encode() + b"\n")
            seen = self.version
            async with self._changed:
                while self.version <= seen and self._cut == cut:
                    await self._changed.wait()
            if self._cut > cut:
                assert request.transport is not None
                request.transport.abort()
                return response
        return response


@asynccontextmanager
async def a_fake_api_server(port: int = 0) -> AsyncIterator[FakeApiServer]:
    """A server on loopback; ``port`` takes up an earlier one's address."""
    server = FakeApiServer()
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/{namespace}/pods", server.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
