"""The route that a receiving worker calls on the sender."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from sangam_core.wire import PROTOCOL_VERSION
from sangam_worker.api.errors import WrongProtocol
from sangam_worker.transfer.exchange import KVExchange, TransferRefused
from sangam_worker.transfer.wire import TransferRequest


def transfer_routes(exchange: KVExchange) -> APIRouter:
    """``POST /internal/v1/transfers``: 200 when sending has begun, 409 with the reason if not."""
    router = APIRouter(prefix="/internal/v1/transfers")

    @router.post("")
    async def send_block(request: TransferRequest) -> JSONResponse:
        if request.protocol != PROTOCOL_VERSION:
            raise WrongProtocol(request.protocol)
        try:
            accepted = await exchange.serve(request)
        except TransferRefused as error:
            return JSONResponse(error.refusal.model_dump(), 409)
        return JSONResponse(accepted.model_dump())

    return router
