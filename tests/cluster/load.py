"""Continuous load: real questions through the ingress, every answer held against its reference.

A thread with an event loop of its own, so that scenarios can call kubectl meanwhile. The small
model answers the same bytes whatever happens to its workers; the references are what the
undisturbed system said, which must be right for the sums.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.cluster.release import HOST
from tests.cluster.settings import INGRESS_URL
from tests.integration.load import Question, questions

from sangam_worker.small_model.material import is_right

NUM_QUESTIONS = 40
CONCURRENCY = 4
ANSWER_SECONDS = 120.0
MAX_TRIES = 20
RETRY_SECONDS = 0.25
MIN_SHARE_RIGHT = 0.9
"""Of two-digit sums; the model's card says 98 %."""


def body_of(question: str, **more: Any) -> dict[str, Any]:
    """A chat request at temperature 0."""
    messages = [{"role": "user", "content": question}]
    return {"model": "sangam-small", "messages": messages, "max_tokens": 128, **more}


async def ask(client: httpx.AsyncClient, question: str) -> str:
    """One answer. Raises ``httpx.HTTPError`` for anything but a 200 with an answer."""
    response = await client.post("/v1/chat/completions", json=body_of(question))
    if response.status_code != 200:
        raise httpx.HTTPStatusError(
            f"{response.status_code}: {response.text[:300]}",
            request=response.request,
            response=response,
        )
    return str(response.json()["choices"][0]["message"]["content"])


def a_client(host: str = HOST) -> httpx.AsyncClient:
    """A client of the ingress."""
    return httpx.AsyncClient(
        base_url=INGRESS_URL, headers={"host": host}, timeout=ANSWER_SECONDS, trust_env=False
    )


def ask_once(question: str = "What is 17 + 25?", host: str = HOST) -> str:
    """One answer through the ingress."""

    async def once() -> str:
        async with a_client(host) as client:
            return await ask(client, question)

    return asyncio.run(once())


@dataclass(frozen=True)
class References:
    """What the undisturbed system answers."""

    answers: dict[str, str]

    @classmethod
    def record(cls) -> "References":
        """Ask every question once; the sums must be right."""
        asked = questions(NUM_QUESTIONS)
        answers = asyncio.run(_ask_all(asked))
        sums = [q for q in asked if q.task == "sum2"]
        num_right = sum(is_right(q.task, q.right_answer, answers[q.text]) for q in sums)
        assert num_right >= MIN_SHARE_RIGHT * len(sums), f"{num_right} of {len(sums)} sums right"
        return cls(answers)


async def _ask_all(asked: list[Question]) -> dict[str, str]:
    slots = asyncio.Semaphore(CONCURRENCY)
    async with a_client() as client:

        async def one(text: str) -> tuple[str, str]:
            async with slots:
                return text, await ask(client, text)

        return dict(await asyncio.gather(*(one(q.text) for q in asked)))


@dataclass
class Load:
    """Clients that ask until they are told to stop.

    Attributes:
        may_retry: whether a client asks again after a broken connection or a 502 or 503, as the
            scenario allows.
        num_answers: right ones so far. num_retries: questions asked again.
        failures: what went wrong for good, and altered answers.
    """

    references: References
    may_retry: bool = False
    num_answers: int = 0
    num_retries: int = 0
    longest_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def wait_for(self, num_more: int, seconds: float = 90) -> None:
        """Wait until so many more answers have come: the load goes on."""
        goal, deadline = self.num_answers + num_more, time.monotonic() + seconds
        while self.num_answers < goal:
            assert not self.failures, self.failures[:5]
            assert time.monotonic() < deadline, f"{num_more} answers did not come in {seconds:g} s"
            time.sleep(0.05)

    def run(self) -> None:
        """The thread's body."""
        asyncio.run(self._run())

    def stop(self) -> None:
        """Let the clients finish what they have asked."""
        self._stopping.set()

    async def _run(self) -> None:
        texts = [*self.references.answers]
        async with a_client() as client, asyncio.TaskGroup() as group:
            for number in range(CONCURRENCY):
                group.create_task(self._ask_on(client, texts[number::CONCURRENCY]))

    async def _ask_on(self, client: httpx.AsyncClient, texts: list[str]) -> None:
        while not self._stopping.is_set():
            for text in texts:
                if self._stopping.is_set():
                    return
                await self._ask(client, text)

    async def _ask(self, client: httpx.AsyncClient, text: str) -> None:
        began = time.monotonic()
        try:
            answer = await self._answer(client, text)
        except httpx.HTTPError as error:
            self.failures.append(f"{text!r}: {type(error).__name__}: {error}")
            return
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
        expected = self.references.answers[text]
        if answer == expected:
            self.num_answers += 1
        else:
            self.failures.append(f"{text!r}: {answer!r} instead of {expected!r}")

    async def _answer(self, client: httpx.AsyncClient, text: str) -> str:
        for _ in range(MAX_TRIES - 1):
            try:
                return await ask(client, text)
            except httpx.HTTPStatusError as error:
                if not self.may_retry or error.response.status_code not in (502, 503):
                    raise
            except httpx.TransportError:
                if not self.may_retry:
                    raise
            self.num_retries += 1
            await asyncio.sleep(RETRY_SECONDS)
        return await ask(client, text)


@contextmanager
def under_load(references: References, *, may_retry: bool = False) -> Iterator[Load]:
    """Load for the length of a block; afterwards no answer may have failed or been altered."""
    load = Load(references, may_retry=may_retry)
    thread = threading.Thread(target=load.run, name="load", daemon=True)
    thread.start()
    try:
        load.wait_for(4)
        yield load
        load.wait_for(8)  # and it goes on afterwards
    finally:
        load.stop()
        thread.join(ANSWER_SECONDS + 10)
        print(  # noqa: T201
            f"\nload: {load.num_answers} answers, {load.num_retries} asked again, "
            f"longest {load.longest_seconds:.1f} s, {len(load.failures)} failed"
        )
    assert not thread.is_alive(), "the load does not end"
    assert load.failures == []
    assert load.num_answers >= 12
