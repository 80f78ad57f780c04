"""Builders with defaults for the router's tests: a model folder, settings, a served public port."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from starlette.types import ASGIApp
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import TOKEN

from sangam_core.decoding import Decoding
from sangam_core.geometry import Geometry
from sangam_router.driver import Driver, DriverLimits
from sangam_router.job import Job
from sangam_router.metrics import RouterMetrics
from sangam_router.model_files import read_model_tokens
from sangam_router.public_api.app import PublicParts, public_app
from sangam_router.public_api.wishes import ServiceLimits, Wishes
from sangam_router.serving import Listener, listen, stop
from sangam_router.settings import RouterSettings
from sangam_router.tokenizer import TextTokenizer
from sangam_router.worker_client import HttpWorkerClient, WorkerClient
from sangam_worker.small_model.tokens import EOS, MASK, write_tokenizer

MODEL = "sangam-small"
MAX_LENGTH = 1024


def write_model_folder(folder: Path, **config: Any) -> Path:
    """A LLaDA-style folder with a byte-level tokenizer and a chat template; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, MAX_LENGTH)
    settings = {
        "architectures": ["LLaDAModelLM"],
        "vocab_size": 288,
        "embedding_size": 288,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "max_sequence_length": MAX_LENGTH,
    }
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def router_settings(**changes: Any) -> RouterSettings:
    return RouterSettings(**({"internal_token": TOKEN, "log_level": "error"} | changes))


def job(prompt: str = "hi", max_tokens: int = 64, **changes: Any) -> Job:
    ids = tuple(prompt.encode())
    decoding = changes.pop("decoding", Decoding(eos_ids=(EOS,)))
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompt_ids": ids,
        "geometry": Geometry.for_answer(len(ids), max_tokens),
        "decoding": decoding,
        "max_tokens": max_tokens,
        "arrival_seconds": 1.0,
    }
    return Job(**(fields | changes))


def worker_client(**changes: Any) -> HttpWorkerClient:
    seconds = {"connect_seconds": 2.0, "answer_seconds": 5.0, "silence_seconds": 5.0}
    return HttpWorkerClient(**({"token": TOKEN} | seconds | changes))


def limits(**changes: Any) -> DriverLimits:
    """The service's limits, with pauses for tests."""
    fields = {
        "request_seconds": 600.0,
        "max_lost": 16,
        "backoff_seconds": 0.001,
        "max_backoff_seconds": 0.01,
        "settle_seconds": 2.0,
    }
    return DriverLimits(**(fields | changes))


def driver(
    places: MemoryPlaces,
    client: WorkerClient,
    clock: Callable[[], float] = time.monotonic,
    **changes: Any,
) -> Driver:
    return Driver(
        places=places,
        workers=client,
        mask_id=MASK,
        decode=lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"),
        limits=limits(**changes),
        metrics=RouterMetrics(),
        clock=clock,
    )


class Served:
    """A public port under test."""

    def __init__(self, url: str, app: ASGIApp, metrics: RouterMetrics) -> None:
        self.url = url
        self.app = app
        self.metrics = metrics

    def client(self, **options: Any) -> AsyncOpenAI:
        defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 20.0}
        return AsyncOpenAI(base_url=f"{self.url}/v1", **(defaults | options))


@asynccontextmanager
async def served(model_folder: Path, places: MemoryPlaces, **changes: Any) -> AsyncIterator[Served]:
    """The public API on a real socket, over places and stub workers."""
    settings = router_settings(**changes)
    metrics = RouterMetrics()
    info, tokenizer = read_model_tokens(model_folder), TextTokenizer.read(model_folder)
    async with worker_client() as client:
        parts = PublicParts(
            settings=settings,
            tokenizer=tokenizer,
            wishes=Wishes(
                info,
                ServiceLimits(
                    default_max_tokens=settings.default_max_tokens,
                    block_length=settings.block_length,
                    max_fan_out=settings.max_fan_out,
                    fixed_mask_buffer_tokens=settings.fixed_mask_buffer_tokens,
                ),
                places,
            ),
            driver=Driver(
                places=places,
                workers=client,
                mask_id=info.mask_id,
                decode=tokenizer.decode,
                limits=limits(request_seconds=settings.request_seconds, max_lost=settings.max_lost),
                metrics=metrics,
            ),
            metrics=metrics,
        )
        listening = listen("127.0.0.1", 0, "test", dead_peer_seconds=settings.send_seconds)
        listener = Listener(public_app(parts), listening)
        server = listener.server(1.0, head_seconds=settings.head_seconds)
        serving = asyncio.create_task(server.serve([listening]))
        try:
            yield Served(listener.url, listener.app, metrics)
        finally:
            await stop(server, serving)
