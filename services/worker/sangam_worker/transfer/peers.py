"""Speaks to other workers about KV over their internal API (aiohttp).

Turns whatever a network can do into ``TransferError``; ``exchange`` decides what that costs.
"""

import aiohttp
from pydantic import ValidationError

from sangam_core.errors import TransferError
from sangam_core.wire import TOKEN_HEADER
from sangam_worker.transfer.refusals import TransferRefused
from sangam_worker.transfer.wire import (
    PairClosed,
    TransferAccepted,
    TransferRefusal,
    TransferRequest,
)

TRANSFERS_PATH = "/internal/v1/transfers"
CLOSED_PATH = TRANSFERS_PATH + "/closed"
URL_HEADER = "x-sangam-worker-url"
"""Who asks. Workers of an older version, which would refuse a field that they do not know, neither
send nor miss it."""

_TELL_SECONDS = 3.0
"""Longest time for telling a peer what it would find out by itself: it may take two seconds to end
what it has (``open_pairs``)."""


class PeerClient:
    """One HTTP session towards all other workers.

    Args:
        own_url: where they can speak to this one.
    """

    def __init__(self, token: str, own_url: str) -> None:
        self._session = aiohttp.ClientSession(headers={TOKEN_HEADER: token, URL_HEADER: own_url})

    async def ask_sender(
        self, url: str, request: TransferRequest, timeout_seconds: float
    ) -> TransferAccepted:
        """Ask the worker at ``url`` to begin sending.

        Raises:
            TransferRefused: it said no.
            TransferError: it could not be reached, or did not answer in time or in our language.
        """
        content = request.model_dump_json()
        status, body = await self._post(url, TRANSFERS_PATH, content, timeout_seconds)
        try:
            if status == 409:
                raise TransferRefused(TransferRefusal.model_validate_json(body))
            if status == 200:
                return TransferAccepted.model_validate_json(body)
        except ValidationError:
            pass
        text = body[:200].decode(errors="replace")
        raise TransferError(f"asking {url}: status {status}: {text}")

    async def tell_closed(self, url: str, closed: PairClosed) -> None:
        """Tell the worker at ``url`` that this end of a pair goes, and wait for its own.

        Raises:
            TransferError: it could not be told.
        """
        await self._post(url, CLOSED_PATH, closed.model_dump_json(), _TELL_SECONDS)

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def _post(
        self, url: str, path: str, content: str, timeout_seconds: float
    ) -> tuple[int, bytes]:
        """Status and body of the answer."""
        try:
            async with self._session.post(
                url.rstrip("/") + path,
                data=content,
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=max(0.001, timeout_seconds)),
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            name = type(error).__name__
            raise TransferError(f"asking {url}: {name} {error}".strip()) from None
