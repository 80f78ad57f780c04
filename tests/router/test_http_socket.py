"""A router's sockets: what their accepted connections inherit."""

import asyncio
import socket

from sangam_router.serving import listen


async def test_an_answers_next_write_does_not_wait_for_an_acknowledgement() -> None:
    """Otherwise chunks of a stream may each wait for the client's delayed ACK."""
    accepted: asyncio.Queue[int] = asyncio.Queue()

    def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        accepted.put_nowait(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listening = listen("127.0.0.1", 0, "test")
    async with await asyncio.start_server(look, sock=listening):
        _, writer = await asyncio.open_connection(*listening.getsockname())
        assert await asyncio.wait_for(accepted.get(), 5)
        writer.close()
        await writer.wait_closed()
