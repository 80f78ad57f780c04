"""Workers without a model, in one process, as cheap as they can be: for ``router_dispatch``.

Each block's events are made of templates; only what the router checks is right in them.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

from aiohttp import web

from sangam_core.lease import WorkerLease
from sangam_core.placement import Role

MASK_ID = 1
EOS_ID = 2
_BLOCK_LENGTH = 32


def lease(number: int, url: str, model: str) -> WorkerLease:
    """The lease of a stub worker: colocated, with room for everything."""
    return WorkerLease(
        worker_id=f"stub-{number}",
        epoch=f"epoch-{number}",
        role=Role.COLOCATED,
        boot_role=Role.COLOCATED,
        url=url,
        model=model,
        total_pages=1_000_000,
        free_pages=1_000_000,
        page_tokens=16,
        block_length=_BLOCK_LENGTH,
        max_sequence_tokens=65536,
    )


def serve_stub_workers(
    sending: Connection, num_workers: int, passes_per_block: int, model: str, cores: Sequence[int]
) -> None:
    """Serve until terminated; sends the workers' URLs first."""
    os.sched_setaffinity(0, cores)
    asyncio.run(_serve(sending, num_workers, passes_per_block))


async def _serve(sending: Connection, num_workers: int, passes_per_block: int) -> None:
    app = web.Application(client_max_size=2**24)

    async def start(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        geometry = body["geometry"]
        begin = geometry["prompt_tokens"] + body["key"]["block"] * geometry["block_length"]
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in _chunks(begin, passes_per_block):
            await response.write(chunk)
            await asyncio.sleep(0)  # each pass is a packet of its own, as with a real worker
        return response

    app.router.add_post("/internal/v1/blocks", start)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    urls = []
    for _ in range(num_workers):
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
    urls = [f"http://{host}:{port}" for host, port, *_ in runner.addresses]
    sending.send(urls)
    await asyncio.Event().wait()


def _chunks(begin: int, passes_per_block: int) -> list[bytes]:
    """The event lines of a block that starts at a position, cut as they are sent."""
    chunks = [
        b'{"type":"queued"}\n',
        b'{"type":"prefilled","queue_seconds":0.001,"prefill_seconds":0.01}\n',
    ]
    positions = range(begin, begin + _BLOCK_LENGTH)
    for step in range(passes_per_block):
        commits = [
            {"position": position, "token": 97 + position % 26, "confidence": 0.95}
            for position in positions[step::passes_per_block]
        ]
        is_last = step + 1 == passes_per_block
        event = {
            "type": "pass",
            "step": step,
            "commits": commits,
            "carry": 0.0,
            "completion": "block" if is_last else "nothing",
            "queue_seconds": 0.0,
            "decode_seconds": 0.005 if step else 0.0,
        }
        chunks.append(json.dumps(event).encode() + b"\n")
    chunks[-1] += b'{"type":"completed","num_passes":%d}\n' % passes_per_block
    return chunks
