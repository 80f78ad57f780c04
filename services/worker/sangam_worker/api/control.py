"""Operator routes: drain, undrain, role; and leave, for the hook that runs before SIGTERM."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from sangam_core.wire import RoleChange
from sangam_worker.drain import RoleControl


def control_routes(control: RoleControl) -> APIRouter:
    """The routes that change a worker's standing; each answers with the standing as it is now."""
    router = APIRouter(prefix="/internal/v1")

    @router.post("/drain")
    async def drain() -> JSONResponse:
        control.drain()
        return JSONResponse(control.report())

    @router.post("/undrain")
    async def undrain() -> JSONResponse:
        control.undrain()
        return JSONResponse(control.report())

    @router.post("/leave")
    async def leave() -> JSONResponse:
        control.begin_to_leave()
        return JSONResponse(control.report())

    @router.post("/role")
    async def change_role(change: RoleChange) -> JSONResponse:
        control.order_role(change.role)
        return JSONResponse(control.report(), 202)

    return router
