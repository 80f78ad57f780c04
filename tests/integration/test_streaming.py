"""Streams as clients read them: text in order, commits out of order, both the same answer."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tests.integration.cluster import RunningCluster, running_cluster, until
from tests.integration.load import Question, questions

from sangam_worker.small_model import tokens

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG = "Count from 1 to 30."
"""An answer of four blocks."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("streaming")
    async with running_cluster(folder, num_routers=1) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: RunningCluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=cluster.base_urls[0], api_key="none", max_retries=0) as made:
        yield made


def body(cluster: RunningCluster, question: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": question}
    return {"model": cluster.model, "messages": [message], "max_tokens": 128, **fields}


async def chunks_of(
    cluster: RunningCluster, question: str, **fields: Any
) -> AsyncGenerator[dict[str, Any], None]:
    """The raw events of a stream, its ``[DONE]`` checked."""
    url = f"{cluster.local.public_urls[0]}/v1/chat/completions"
    done = False
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body(cluster, question, stream=True, **fields)) as response,
    ):
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                assert not done
                yield json.loads(line.removeprefix(b"data: "))
    assert done


async def test_streamed_text_is_the_plain_answer(
    cluster: RunningCluster, client: AsyncOpenAI
) -> None:
    asked: list[Question] = questions(8)
    for question in asked:
        plain = await client.chat.completions.create(**body(cluster, question.text))
        stream = await client.chat.completions.create(**body(cluster, question.text), stream=True)
        pieces = [chunk.choices[0] async for chunk in stream]
        text = "".join(piece.delta.content or "" for piece in pieces)
        assert text == plain.choices[0].message.content
        assert pieces[-1].finish_reason == plain.choices[0].finish_reason


async def test_denoising_events_rebuild_the_final_text(cluster: RunningCluster) -> None:
    commits: dict[int, int] = {}
    order: list[int] = []
    text = ""
    options = {"include_denoising": True, "include_usage": True}
    usage: dict[str, int] = {}
    steps: list[tuple[int, int]] = []
    async for chunk in chunks_of(cluster, LONG, stream_options=options, temperature=0):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            for event in choice.get("denoising") or ():
                assert event["position"] not in commits, "a commit is never revised"
                commits[event["position"]] = event["token"]
                order.append(event["position"])
                steps.append((event["block"], event["step"]))
                assert 0 <= event["confidence"] <= 1
    start = usage["prompt_tokens"]
    last = start + usage["completion_tokens"]
    assert tokens.decode(commits[p] for p in range(start, last)) == text
    assert text
    assert min(commits) == start
    assert order != sorted(order), "tokens commit out of order"
    assert steps == sorted(steps), "passes come in order"
    assert len({block for block, _ in steps}) > 1


async def test_a_client_that_goes_away_frees_everything(cluster: RunningCluster) -> None:
    before = await cluster.total("sangam_requests_total", outcome="cancelled")
    seen = 0
    options = {"include_denoising": True}
    async with aclosing(
        chunks_of(cluster, LONG, max_tokens=512, ignore_eos=True, stream_options=options)
    ) as chunks:
        async for chunk in chunks:
            seen += len(chunk["choices"])
            if seen > 3:
                break

    async def objection() -> str:
        now = await cluster.total("sangam_requests_total", outcome="cancelled")
        return "" if now == before + 1 else f"{now - before} cancelled"

    await until(objection, 5.0)
    await cluster.assert_idle(5.0)


async def test_a_stop_string_ends_the_answer_and_never_leaks(cluster: RunningCluster) -> None:
    whole = "".join(
        [c["choices"][0]["delta"].get("content") or "" async for c in chunks_of(cluster, LONG)]
    )
    stop = whole[len(whole) // 2 :][:4]
    assert len(stop) == 4
    pieces: list[str] = []
    reason = None
    async for chunk in chunks_of(cluster, LONG, stop=[stop, "never"]):
        choice = chunk["choices"][0]
        pieces.append(choice["delta"].get("content") or "")
        reason = choice["finish_reason"] or reason
    text = "".join(pieces)
    assert text == whole.partition(stop)[0]
    assert reason == "stop"
    await cluster.assert_idle(10.0)


async def test_n_choices_at_a_temperature_differ_and_repeat_with_their_seed(
    cluster: RunningCluster, client: AsyncOpenAI
) -> None:
    wishes = body(cluster, "Tell me a story about a fox.", n=3, temperature=1.5, seed=7)
    first = await client.chat.completions.create(**wishes)
    second = await client.chat.completions.create(**wishes)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in second.choices]


async def test_usage_comes_last_and_alone_when_asked_for(
    cluster: RunningCluster, client: AsyncOpenAI
) -> None:
    stream = await client.chat.completions.create(
        **body(cluster, "What is 17 + 25?"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == len(b"17 + 25 = 42")
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_many_streams_at_once_each_get_their_own_answer(
    cluster: RunningCluster, client: AsyncOpenAI
) -> None:
    asked = questions(16)

    async def read(question: str) -> str:
        stream = await client.chat.completions.create(
            **body(cluster, question), stream=True, temperature=0
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    alone = [await read(question.text) for question in asked]
    together = await asyncio.gather(*(read(question.text) for question in asked))
    assert together == alone
    await cluster.assert_idle(10.0)
