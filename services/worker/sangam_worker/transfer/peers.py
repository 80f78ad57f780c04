"""Asks other workers for KV over their internal API (aiohttp).

Turns whatever a network can do into ``TransferError``; ``exchange`` decides what that costs.
"""

import aiohttp
from pydantic import ValidationError

from sangam_core.errors import TransferError
from sangam_core.wire import TOKEN_HEADER
from sangam_worker.transfer.exchange import TransferRefused
from sangam_worker.transfer.wire import TransferAccepted, TransferRefusal, TransferRequest

TRANSFERS_PATH = "/internal/v1/transfers"


class PeerClient:
    """One HTTP session towards all other workers."""

    def __init__(self, token: str) -> None:
        self._session = aiohttp.ClientSession(headers={TOKEN_HEADER: token})

    async def ask_sender(
        self, url: str, request: TransferRequest, timeout_seconds: float
    ) -> TransferAccepted:
        """Ask the worker at ``url`` to begin sending.

        Raises:
            TransferRefused: it said no.
            TransferError: it could not be reached, or did not answer in time or in our language.
        """
        timeout = aiohttp.ClientTimeout(total=max(0.001, timeout_seconds))
        try:
            async with self._session.post(
                url.rstrip("/") + TRANSFERS_PATH,
                data=request.model_dump_json(),
                headers={"content-type": "application/json"},
                timeout=timeout,
            ) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            name = type(error).__name__
            raise TransferError(f"asking {url}: {name} {error}".strip()) from None
        try:
            if status == 409:
                raise TransferRefused(TransferRefusal.model_validate_json(body))
            if status == 200:
                return TransferAccepted.model_validate_json(body)
        except ValidationError:
            pass
        text = body[:200].decode(errors="replace")
        raise TransferError(f"asking {url}: status {status}: {text}")

    async def close(self) -> None:
        """End the session."""
        await self._session.close()
