"""The worker's socket: what its accepted connections inherit."""

import asyncio
import socket

from sangam_worker.server import bind


async def test_an_answers_next_write_does_not_wait_for_an_acknowledgement() -> None:
    """Otherwise each block on a kept connection loses 40 ms to the router's delayed ACK."""
    accepted: asyncio.Queue[int] = asyncio.Queue()

    def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        accepted.put_nowait(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listening = bind("127.0.0.1", [0])
    async with await asyncio.start_server(look, sock=listening):
        _, writer = await asyncio.open_connection(*listening.getsockname())
        assert await asyncio.wait_for(accepted.get(), 5)
        writer.close()
        await writer.wait_closed()
