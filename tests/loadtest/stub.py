"""A stub of the OpenAI API over real HTTP, in a thread: it answers as a test wants it to."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
TIMINGS = {
    "latency_seconds": 0.05,
    "first_token_seconds": 0.02,
    "queueing_seconds": 0.01,
    "prefill_queueing_seconds": 0.007,
    "decode_queueing_seconds": 0.003,
    "prefill_seconds": 0.02,
    "decode_seconds": 0.015,
    "transfer_seconds": 0.005,
    "num_blocks": 2,
    "num_steps": 9,
    "num_retries": 1,
    "placements": [["w-0"], ["w-1", "w-0"]],
    "commit_counts": [[20, 6, 3, 2, 1], [29, 1, 1, 1]],
}
WAIT_SECONDS = 10.0


@dataclass
class Served:
    """What the stub has seen: bodies with their path, in order of arrival."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


async def stream_of(
    request: web.Request, body: dict[str, Any], *texts: str, gap_seconds: float = 0.0
) -> web.StreamResponse:
    """A whole streamed answer with usage and timings, as Sangam's router sends it."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    is_chat = "messages" in body
    for text in texts:
        if gap_seconds:
            await asyncio.sleep(gap_seconds)
        choice = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if is_chat else {"text": text}
        await event(response, {"choices": [choice], "usage": None})
    last: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    last |= {"delta": {}} if is_chat else {"text": ""}
    await event(response, {"choices": [last], "sangam": {"timings": TIMINGS}})
    usage = {"prompt_tokens": 11, "completion_tokens": body["max_tokens"], "total_tokens": 99}
    await event(response, {"choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")
    return response


async def event(response: web.StreamResponse, content: dict[str, Any]) -> None:
    """One server-sent event."""
    await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")


@contextmanager
def serving(handler: Handler, *, lists_models: bool = True) -> Iterator[Served]:
    """Serve both completion endpoints with ``handler``, and a list of two models."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    served = Served("")
    ending = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        served.bodies.append(body)
        served.paths.append(request.path)
        return await handler(request, body)

    async def models(request: web.Request) -> web.Response:
        if not lists_models:
            return web.json_response({"error": {"message": "not here"}}, status=404)
        served_models = [{"id": "stub-model"}, {"id": "stub-model-2"}]
        return web.json_response({"object": "list", "data": served_models})

    async def serve() -> None:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/completions", answer)
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        served.url = f"http://{host}:{port}"
        ready.set()
        await ending.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(WAIT_SECONDS)
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(WAIT_SECONDS)
        loop.close()
