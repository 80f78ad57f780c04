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

    listening = listen("127.0.0.1", 0, "test", dead_peer_seconds=60.0)
    async with await asyncio.start_server(look, sock=listening):
        _, writer = await asyncio.open_connection(*listening.getsockname())
        assert await asyncio.wait_for(accepted.get(), 5)
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_takes_nothing_holds_no_socket_for_ever() -> None:
    """Closing one waits until all that was written is taken, and nothing else ends that."""
    lost = asyncio.Event()

    class SaysMuchAndCloses(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(b"x" * 4_000_000)
            transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            lost.set()

    listening = listen("127.0.0.1", 0, "test", dead_peer_seconds=0.5)
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        async with await loop.create_server(SaysMuchAndCloses, sock=listening):
            await loop.sock_connect(client, listening.getsockname())
            await asyncio.wait_for(lost.wait(), 10)
