"""Whole workers as processes, with the real engine, gloo and Redis."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from tests.worker.case_client import LostOnTheWay, Place, run_case
from tests.worker.harness import TOKEN, eventually
from tests.worker.ledger_watch import a_watch

from sangam_core.decoding import EosRule
from sangam_core.wire import TOKEN_HEADER, BlockKey, BlockStart, PassRan, WireGeometry
from sangam_router.local.redis_server import RedisServer, running_redis
from sangam_worker.verify import Case, read_cases

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

GOLDEN = Path(__file__).parents[1] / "golden"
START_SECONDS = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as running:
        yield running


def cached_cases(number: int) -> list[Case]:
    """LLaDA cases that can be split over two workers, in several blocks."""
    cases = [
        case
        for case in read_cases(GOLDEN)
        if case.family == "llada"
        and case.decoding.cache != "none"
        and case.decoding.eos_rule is EosRule.IGNORE
        and case.geometry.num_blocks > 1
    ]
    return cases[:number]


@dataclass
class WorkerProcess:
    """A ``python -m sangam_worker``."""

    process: asyncio.subprocess.Process
    place: Place
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    async def end(self, number: signal.Signals) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), START_SECONDS)


@asynccontextmanager
async def a_process(
    tmp_path: Path, server: RedisServer, name: str, case: Case, **env: str
) -> AsyncIterator[WorkerProcess]:
    """A worker process that is ready; killed at the end if it still runs."""
    port_file, log_path = tmp_path / f"{name}.port", tmp_path / f"{name}.log"
    port_file.unlink(missing_ok=True)
    settings = {
        "SANGAM_MODEL": str(case.model),
        "SANGAM_WORKER_ID": name,
        "SANGAM_INTERNAL_TOKEN": TOKEN,
        "SANGAM_REDIS_URL": server.url,
        "SANGAM_PORT_RANGE": "20000-29999",
        "SANGAM_PORT_FILE": str(port_file),
        "SANGAM_TOTAL_PAGES": "256",
        "SANGAM_DRAIN_DEADLINE_SECONDS": "5",
        "OMP_NUM_THREADS": "1",
        **env,
    }
    with log_path.open("w") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "sangam_worker"),
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession(headers={TOKEN_HEADER: TOKEN}) as http:
            deadline = time.monotonic() + START_SECONDS
            while not port_file.exists():
                assert process.returncode is None, log_path.read_text()
                assert time.monotonic() < deadline, log_path.read_text()
                await asyncio.sleep(0.05)
            url = f"http://127.0.0.1:{port_file.read_text().strip()}"

            async def is_ready() -> bool:
                async with http.get(f"{url}/readyz") as response:
                    return response.status == 200

            await eventually(is_ready)
            yield WorkerProcess(process, Place(http, url), log_path)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_worker_serves_a_checkpoint_and_leaves_on_sigterm(
    tmp_path: Path, server: RedisServer
) -> None:
    (case,) = cached_cases(1)
    async with a_process(tmp_path, server, "w", case) as worker, a_watch(server) as watch:
        assert await watch.lease("w")
        assert await run_case(case, worker.place) == case.output_ids
        held = await worker.place.held()
        assert (held.blocks, held.free_pages) == ((), 256)
        assert 20000 <= int(worker.place.url.rpartition(":")[2]) <= 29999
        assert await worker.end(signal.SIGTERM) == 0
        assert await watch.lease("w") is None
        assert '"role": "colocated"' in worker.log
        assert '"total_pages": 256' in worker.log


async def test_a_second_signal_cuts_the_drain_short(tmp_path: Path, server: RedisServer) -> None:
    (case,) = cached_cases(1)
    env = {"SANGAM_ROLE": "prefill", "SANGAM_DRAIN_DEADLINE_SECONDS": "600"}
    async with a_process(tmp_path, server, "w", case, **env) as worker, a_watch(server) as watch:
        held = await worker.place.start(await a_held_block(case, worker.place))
        await held.until(PassRan)
        worker.process.send_signal(signal.SIGTERM)

        async def drains() -> bool:
            lease = await watch.lease("w")
            return lease is not None and lease.is_draining

        await eventually(drains)
        assert worker.process.returncode is None
        assert await worker.end(signal.SIGTERM) == 1
        held.response.close()


async def a_held_block(case: Case, place: Place) -> BlockStart:
    """A start whose block waits at the worker until someone fetches it."""
    masks = [case.mask_id] * case.geometry.mask_buffer_tokens
    return BlockStart(
        key=BlockKey(request_id="held", block=0),
        worker_epoch=(await place.held()).epoch,
        arrival_seconds=0.0,
        ids=(*case.prompt_ids, *masks),
        geometry=WireGeometry.of(case.geometry),
        decoding=case.decoding,
        hands_over=True,
    )


async def test_two_workers_give_what_one_gives_and_survive_the_other_s_kill(
    tmp_path: Path, server: RedisServer
) -> None:
    cases = cached_cases(4)
    env = {"SANGAM_TRANSFER_DEADLINE_SECONDS": "20"}
    prefill = {**env, "SANGAM_ROLE": "prefill"}
    decode = {**env, "SANGAM_ROLE": "decode"}
    async with a_process(tmp_path, server, "receiver", cases[0], **decode) as receiver:
        async with a_process(tmp_path, server, "sender", cases[0], **prefill) as sender:
            answers = await asyncio.gather(
                *(run_case(case, sender.place, receiver.place) for case in cases)
            )
            for case, answer in zip(cases, answers, strict=True):
                assert answer == case.output_ids, case.id
            runs = [
                asyncio.create_task(run_case(case, sender.place, receiver.place, f"doomed{n}"))
                for n, case in enumerate(cases * 4)
            ]
            await eventually(lambda: is_busy(receiver.place))
            assert await sender.end(signal.SIGKILL) == -signal.SIGKILL
            outcomes = await asyncio.gather(*runs, return_exceptions=True)
            failures = [each for each in outcomes if isinstance(each, BaseException)]
            assert failures, "the kill came too late"
            known = LostOnTheWay | OSError | aiohttp.ClientError
            assert all(isinstance(each, known) for each in failures), failures
            await eventually(lambda: is_idle(receiver.place))
        async with a_process(tmp_path, server, "sender", cases[0], **prefill) as sender:
            answer = await run_case(cases[0], sender.place, receiver.place, "again")
            assert answer == cases[0].output_ids
        assert "Traceback" not in receiver.log


async def is_busy(place: Place) -> bool:
    return bool((await place.held()).blocks)


async def is_idle(place: Place) -> bool:
    held = await place.held()
    return not held.blocks and held.free_pages == held.total_pages


def test_what_cannot_start_says_so_on_one_line_with_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sangam_worker"],
        env={**os.environ, "SANGAM_INTERNAL_TOKEN": TOKEN, "SANGAM_MODEL": "/nowhere/at/all"},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 2
    assert "/nowhere/at/all" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
