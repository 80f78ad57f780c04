"""Questions with known answers, asked of a cluster through the official ``openai`` client."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import openai
from openai import AsyncOpenAI
from tests.integration.cluster import RunningCluster
from tests.integration.knobs import CONCURRENCY, SEED

from sangam_worker.small_model.material import held_out_pairs, is_right

REQUEST_SECONDS = 90.0
MAX_TRIES = 60
RETRY_SECONDS = 0.25

SHORT_TASK = "sum2"
LONG_TASKS = ("retell", "count", "repeat", "reverse")
"""Answers of one to four blocks, several passes each."""


@dataclass(frozen=True)
class Question:
    """A held-out question with its right answer."""

    task: str
    text: str
    right_answer: str


def questions(count: int, seed: int = SEED) -> list[Question]:
    """Half two-digit sums, half longer answers, mixed."""
    num_sums = -(-count // 2)
    parts = [(SHORT_TASK, num_sums)]
    for index, task in enumerate(LONG_TASKS):
        parts.append((task, (count - num_sums + index) // len(LONG_TASKS)))
    by_task = [
        [Question(task, text, answer) for text, answer in held_out_pairs(task, number, seed)]
        for task, number in parts
    ]
    mixed = [q for group in by_task for q in group]
    return sorted(mixed, key=lambda q: hash_of(q.text))


def hash_of(text: str) -> int:
    """A fixed shuffle."""
    return int.from_bytes(text.encode(), "big") * 2_654_435_761 % 2**32


def accuracy(asked: Sequence[Question], answers: Sequence[str], task: str = SHORT_TASK) -> float:
    """Share of a task's questions that were answered right."""
    rights = [
        is_right(task, question.right_answer, answer)
        for question, answer in zip(asked, answers, strict=True)
        if question.task == task
    ]
    return sum(rights) / len(rights)


@dataclass
class Tally:
    """What clients had to go through."""

    num_retries: int = 0


class Clients:
    """One ``openai`` client a router. Nothing is retried inside the client."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._clients = [
            AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=REQUEST_SECONDS)
            for url in cluster.base_urls
        ]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Clients":
        for client in self._clients:
            await self._stack.enter_async_context(client)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    def __getitem__(self, index: int) -> AsyncOpenAI:
        return self._clients[index % len(self._clients)]

    async def ask(self, question: str, router: int = 0, max_tokens: int = 128) -> str:
        """One answer at temperature 0, from one router; errors are raised."""
        completion = await self[router].chat.completions.create(
            model=self._cluster.model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=max_tokens,
        )
        return completion.choices[0].message.content or ""

    async def ask_stubbornly(self, question: str, router: int, tally: Tally) -> str:
        """Ask, and where a router breaks off, ask the next one, as a client of two routers does."""
        for attempt in range(MAX_TRIES):
            try:
                return await self.ask(question, router + attempt)
            except openai.APIConnectionError:
                tally.num_retries += 1
                await asyncio.sleep(RETRY_SECONDS)
        raise AssertionError(f"no router answered {question!r} in {MAX_TRIES} tries")

    async def ask_all(
        self,
        asked: Sequence[Question],
        *,
        concurrency: int = CONCURRENCY,
        max_tokens: int = 128,
        retries_other_router: bool = False,
    ) -> tuple[list[str], Tally]:
        """Every question, ``concurrency`` at a time, over the routers in turn; answers in order."""
        slots = asyncio.Semaphore(concurrency)
        tally = Tally()

        async def one(index: int, question: Question) -> str:
            async with slots:
                if retries_other_router:
                    return await self.ask_stubbornly(question.text, index, tally)
                return await self.ask(question.text, index, max_tokens)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i, question)) for i, question in enumerate(asked)]
        return [task.result() for task in tasks], tally


def differences(asked: Sequence[Question], first: Sequence[str], second: Sequence[str]) -> str:
    """Where two runs disagree, for a failure message; empty where they do not."""
    return "\n".join(
        f"{question.text!r}: {a!r} != {b!r}"
        for question, a, b in zip(asked, first, second, strict=True)
        if a != b
    )
