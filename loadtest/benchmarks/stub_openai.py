"""A server without a model that streams canned answers, as cheap as it can be: for ``client_load``.

Speaks just enough HTTP/1.1 for the load test's client; every answer takes the same time and has
the same chunks, spread evenly over it.
"""

import asyncio
import json
from multiprocessing.connection import Connection

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"stub","object":"model"}]}'
_TIMINGS = {
    "latency_seconds": 0.1,
    "first_token_seconds": 0.05,
    "queueing_seconds": 0.01,
    "prefill_queueing_seconds": 0.01,
    "decode_queueing_seconds": 0.0,
    "prefill_seconds": 0.04,
    "decode_seconds": 0.05,
    "transfer_seconds": 0.0,
    "num_blocks": 2,
    "num_steps": 16,
    "num_retries": 0,
    "placements": [["stub-0"], ["stub-0"]],
    "commit_counts": [[18, 2, 2, 2, 2, 2, 2, 2], [18, 2, 2, 2, 2, 2, 2, 2]],
}


def _event(content: dict[str, object]) -> bytes:
    data = b"data: " + json.dumps({"id": "cmpl-1", "model": "stub", **content}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def canned(num_chunks: int) -> list[bytes]:
    """The pieces of an answer; the last one carries timings, usage and the end."""
    choice = {"index": 0, "text": "some words ", "finish_reason": None}
    pieces = [_event({"choices": [choice], "usage": None})] * num_chunks
    last = {"index": 0, "text": "", "finish_reason": "length"}
    usage = {"prompt_tokens": 10, "completion_tokens": 4 * num_chunks, "total_tokens": 99}
    end = _event({"choices": [last], "sangam": {"timings": _TIMINGS}})
    end += _event({"choices": [], "usage": usage})
    return [*pieces, end + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]


class StubProtocol(asyncio.Protocol):
    """One connection; requests on it come one after another."""

    def __init__(self, pieces: list[bytes], seconds: float) -> None:
        self._pieces = pieces
        self._gap_seconds = seconds / len(pieces)
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer once a whole request is there."""
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(body) < length:
            return
        self._received = body[length:]
        if head.startswith(b"GET"):
            answer = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            )
            self._transport.write(answer % (len(_MODELS), _MODELS))
        else:
            self._transport.write(_HEAD)
            self._next(0)

    def _next(self, index: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(self._pieces[index])
        if index + 1 < len(self._pieces):
            loop = asyncio.get_running_loop()
            loop.call_later(self._gap_seconds, self._next, index + 1)


def serve_stub_openai(sending: Connection, seconds: float, num_chunks: int) -> None:
    """Serve until terminated; sends the URL first."""

    async def serve() -> None:
        pieces = canned(num_chunks)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: StubProtocol(pieces, seconds), "127.0.0.1", 0, backlog=4096
        )
        sending.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await server.serve_forever()

    asyncio.run(serve())
