"""The routes that workers call on each other."""

from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi.responses import JSONResponse

from sangam_core.wire import PROTOCOL_VERSION
from sangam_worker.api.errors import WrongProtocol
from sangam_worker.transfer.exchange import KVExchange
from sangam_worker.transfer.peers import URL_HEADER
from sangam_worker.transfer.refusals import TransferRefused
from sangam_worker.transfer.wire import PairClosed, TransferRequest


def transfer_routes(exchange: KVExchange) -> APIRouter:
    """``POST /internal/v1/transfers``: 200 when sending has begun, 409 with the reason if not.

    ``POST /internal/v1/transfers/closed``: 204 when the pair is gone here too.
    """
    router = APIRouter(prefix="/internal/v1/transfers")

    @router.post("")
    async def send_block(
        request: TransferRequest, url: Annotated[str, Header(alias=URL_HEADER)] = ""
    ) -> JSONResponse:
        if request.protocol != PROTOCOL_VERSION:
            raise WrongProtocol(request.protocol)
        try:
            accepted = await exchange.serve(request, url)
        except TransferRefused as error:
            return JSONResponse(error.refusal.model_dump(), 409)
        return JSONResponse(accepted.model_dump())

    @router.post("/closed")
    async def pair_closed(closed: PairClosed) -> Response:
        if closed.protocol != PROTOCOL_VERSION:
            raise WrongProtocol(closed.protocol)
        await exchange.closed_by_peer(closed)
        return Response(status_code=204)

    return router
