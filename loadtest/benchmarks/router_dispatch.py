"""Block dispatches a second of one router process on one core, workers stubbed.

Everything of a dispatch is real but the model: snapshot, placement and reservation in a real
Redis, the start over HTTP, the event stream, the text, both releases. The stub workers, Redis and
the router run as separate processes; the router's is pinned to one core, where the machine allows
it. The goal is held against dispatches a second of its CPU time, since other processes share that
core; those by the clock stand beside them. Prints a table; with ``--json``
writes what was seen. ``make bench-router`` runs it.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from redis.asyncio import Redis

from benchmarks.stub_workers import EOS_ID, MASK_ID, lease, serve_stub_workers
from sangam_core.decoding import Decoding, EosRule
from sangam_core.geometry import Geometry
from sangam_core.logs import configure_logging
from sangam_core.placement import PlacementPolicy
from sangam_router.driver import Driver, DriverLimits
from sangam_router.fleet import FleetView
from sangam_router.job import Delta, Job
from sangam_router.ledger import Ledger
from sangam_router.ledger.connect import connect
from sangam_router.ledger.placing import Placer
from sangam_router.ledger_places import LedgerPlaces
from sangam_router.local.redis_server import running_redis
from sangam_router.metrics import RouterMetrics
from sangam_router.worker_client import HttpWorkerClient

MODEL = "stub"
TOKEN = "benchmark"
GOAL_PER_SECOND = 500.0


@dataclass(frozen=True)
class Load:
    """What is driven.

    Attributes:
        num_blocks, prompt_tokens: of each request. passes_per_block: events that a block streams.
    """

    concurrency: int
    num_requests: int
    num_blocks: int
    prompt_tokens: int
    passes_per_block: int
    num_workers: int


@dataclass(frozen=True)
class Round:
    """One round: wall and CPU seconds of the router's process for so many dispatches."""

    num_dispatches: int
    wall_seconds: float
    cpu_seconds: float

    @property
    def per_second(self) -> float:
        """Dispatches a second of wall time: what other processes take is lost."""
        return self.num_dispatches / self.wall_seconds

    @property
    def per_cpu_second(self) -> float:
        """Dispatches a second of the router's CPU time: what a core to itself would give."""
        return self.num_dispatches / self.cpu_seconds


def main() -> None:
    """Read the command line, measure, print and write what was seen."""
    given = _arguments()
    load = Load(
        concurrency=given.concurrency,
        num_requests=given.requests,
        num_blocks=given.blocks,
        prompt_tokens=given.prompt_tokens,
        passes_per_block=given.passes,
        num_workers=given.workers,
    )
    with running_redis() as redis, Path(os.devnull).open("w") as nowhere:
        configure_logging("info", "json")  # a line an answer, as in production
        for handler in logging.getLogger().handlers:
            assert isinstance(handler, logging.StreamHandler)
            handler.setStream(nowhere)
        rounds = _in_process(load, given.rounds, redis.url)
    sys.stdout.write(table(load, rounds))
    if given.json is not None:
        content = {"load": asdict(load), "rounds": [asdict(item) for item in rounds]}
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--concurrency", type=int, default=32, help="requests in flight (32)")
    parser.add_argument("--requests", type=int, default=500, help="requests a round (500)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of a request (4)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="prompt length (256)")
    parser.add_argument("--passes", type=int, default=6, help="passes of a block (6)")
    parser.add_argument("--workers", type=int, default=4, help="stub workers (4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, the first to warm up (5)")
    parser.add_argument("--json", type=Path, default=None, help="file for every round")
    return parser.parse_args()


def table(load: Load, rounds: list[Round]) -> str:
    """Each round, the medians without the warm-up, and whether the goal is met."""
    measured = rounds[1:] or rounds
    lines = [
        f"{load.num_requests} requests of {load.num_blocks} blocks, {load.passes_per_block} passes "
        f"each, {load.concurrency} in flight, {load.num_workers} stub workers",
        f"{'round':>8} {'dispatches/s':>14} {'per CPU second':>16}",
    ]
    for index, item in enumerate(rounds):
        name = "warm-up" if index == 0 and len(rounds) > 1 else str(index)
        lines.append(f"{name:>8} {item.per_second:>14.0f} {item.per_cpu_second:>16.0f}")
    wall = median(item.per_second for item in measured)
    cpu = median(item.per_cpu_second for item in measured)
    lines.append(f"{'median':>8} {wall:>14.0f} {cpu:>16.0f}")
    verdict = "met" if cpu >= GOAL_PER_SECOND else "missed"
    lines.append(
        f"goal of {GOAL_PER_SECOND:.0f} dispatches/s on one core: {verdict}, at {cpu:.0f} a second "
        f"of the router's CPU time ({wall:.0f} by the clock, with what else runs here)"
    )
    return "\n".join(lines) + "\n"


def _in_process(load: Load, num_rounds: int, redis_url: str) -> list[Round]:
    """Stub workers in a child on the other cores, the router here on one."""
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(
        target=serve_stub_workers,
        args=(sending, load.num_workers, load.passes_per_block, MODEL, cores[1:] or cores),
        daemon=True,
    )
    child.start()
    try:
        urls = _urls_from(receiving)
        os.sched_setaffinity(0, cores[:1])
        return asyncio.run(_measure(load, num_rounds, redis_url, urls))
    finally:
        os.sched_setaffinity(0, cores)
        child.terminate()
        child.join(5)


def _urls_from(receiving: Connection) -> list[str]:
    if not receiving.poll(30):
        raise SystemExit("the stub workers did not start within 30 s")
    urls: list[str] = receiving.recv()
    return urls


async def _measure(load: Load, num_rounds: int, redis_url: str, urls: list[str]) -> list[Round]:
    redis = connect(redis_url, timeout_seconds=2.0)
    ledger = Ledger(
        redis,
        namespace="benchmark",
        router_id="benchmark",
        model=MODEL,
        lease_seconds=10.0,
        poll_seconds=1.0,
    )
    policy = PlacementPolicy()
    fleet = FleetView(ledger, policy=policy, worker_lease_seconds=600.0)
    client = HttpWorkerClient(
        token=TOKEN, connect_seconds=5.0, answer_seconds=30.0, silence_seconds=30.0
    )
    try:
        await _publish_leases(redis_url, ledger, urls)
        async with client, asyncio.TaskGroup() as group:
            background = group.create_task(ledger.run())
            driver = Driver(
                places=LedgerPlaces(
                    ledger,
                    Placer(ledger, fleet, policy, patience_seconds=30.0),
                    fleet,
                    max_waiting=10_000,
                    stall_seconds=30.0,
                ),
                workers=client,
                mask_id=MASK_ID,
                decode=lambda ids: "".join(map(chr, ids)),
                limits=DriverLimits(
                    request_seconds=600.0,
                    max_lost=16,
                    backoff_seconds=0.05,
                    max_backoff_seconds=2.0,
                    settle_seconds=2.0,
                ),
                metrics=RouterMetrics(),
            )
            rounds = [await _round(load, driver, number) for number in range(num_rounds)]
            background.cancel()
        return rounds
    finally:
        await ledger.aclose()
        await redis.aclose()


async def _publish_leases(redis_url: str, ledger: Ledger, urls: list[str]) -> None:
    """What the workers' heartbeats would do."""
    redis = Redis.from_url(redis_url)
    for number, url in enumerate(urls):
        found = lease(number, url, MODEL)
        await redis.hset(ledger.keys.worker(found.worker_id), mapping=found.fields())
        await redis.sadd(ledger.keys.workers, found.worker_id)
    await redis.aclose()


async def _round(load: Load, driver: Driver, number: int) -> Round:
    slots = asyncio.Semaphore(load.concurrency)
    geometry = Geometry(load.prompt_tokens, load.num_blocks)
    decoding = Decoding(eos_ids=(EOS_ID,), eos_rule=EosRule.IGNORE)
    prompt = tuple(65 + index % 26 for index in range(load.prompt_tokens))

    def ignore(delta: Delta) -> None:
        return None

    async def one(index: int) -> None:
        async with slots:
            job = Job(
                request_id=f"{number}-{index}",
                prompt_ids=prompt,
                geometry=geometry,
                decoding=decoding,
                max_tokens=geometry.mask_buffer_tokens,
                arrival_seconds=time.time(),
            )
            answer = await driver.run(job, ignore)
            assert answer.num_tokens == geometry.mask_buffer_tokens

    wall, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for index in range(load.num_requests):
            group.create_task(one(index))
    return Round(
        num_dispatches=load.num_requests * load.num_blocks,
        wall_seconds=time.perf_counter() - wall,
        cpu_seconds=time.process_time() - cpu,
    )


if __name__ == "__main__":
    main()
