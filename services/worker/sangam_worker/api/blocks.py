"""Block routes: start and stream, cancel or release, list.

Parsing and framing only; ``service`` decides.
"""

import asyncio
import json

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from sangam_core.wire import PROTOCOL_VERSION, BlockKey, BlockStart, HeldBlocks
from sangam_worker.api.errors import WrongProtocol, invalid_request_of
from sangam_worker.service import BlockService
from sangam_worker.streams import BlockStream

_REMOVE_WAIT_SECONDS = 2.0
"""How long a DELETE waits for the block to be gone before it answers 202."""


class EventStreamResponse(Response):
    """A block's events, one JSON line each, until it has ended or the reader has gone."""

    media_type = "application/x-ndjson"

    def __init__(self, service: BlockService, stream: BlockStream) -> None:
        super().__init__()
        self._service = service
        self._stream = stream
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream; a reader that goes away cancels the block."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for chunk in self._stream.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            watcher.cancel()
            if not self._stream.ended.is_set():
                self._service.abandon(self._stream.key)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._stream.ended.is_set():
            self._service.abandon(self._stream.key)


def block_routes(service: BlockService) -> APIRouter:
    """The routes under ``/internal/v1/blocks``."""
    router = APIRouter(prefix="/internal/v1/blocks")

    @router.post("")
    async def start_block(request: Request) -> Response:
        start = parse_block_start(await request.body())
        return EventStreamResponse(service, await service.start_block(start))

    @router.get("")
    async def list_blocks() -> HeldBlocks:
        return await service.held()

    @router.delete("/{request_id:path}/{block}/{attempt}")
    async def remove_block(request_id: str, block: int, attempt: int) -> Response:
        try:
            key = BlockKey(request_id=request_id, block=block, attempt=attempt)
        except ValidationError as error:
            raise invalid_request_of(error) from None
        is_gone = await service.remove(key, _REMOVE_WAIT_SECONDS)
        return Response(status_code=204 if is_gone else 202)

    return router


def parse_block_start(body: bytes) -> BlockStart:
    """Read a block start.

    Raises:
        WrongProtocol: whatever else is wrong with it.
        InvalidRequest: naming the field.
    """
    try:
        start = BlockStart.model_validate_json(body)
    except ValidationError as error:
        _check_protocol(body)
        raise invalid_request_of(error) from None
    if start.protocol != PROTOCOL_VERSION:
        raise WrongProtocol(start.protocol)
    return start


def _check_protocol(body: bytes) -> None:
    """Another version's body need not parse, but its number says why."""
    try:
        spoken = json.loads(body).get("protocol", PROTOCOL_VERSION)
    except (ValueError, AttributeError, RecursionError):
        return
    if spoken != PROTOCOL_VERSION:
        raise WrongProtocol(spoken)
