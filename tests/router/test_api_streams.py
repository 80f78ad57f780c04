"""Streams of the public API: order, usage, commits, keep-alives, errors after the first byte."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from tests.router.builders import MODEL, served
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import ConnectionBreaks, StubWorker, say
from tests.router.test_api_answers import TEXT, asked, messages

from sangam_core.wire import BlockStart


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The stream's events and comments, framing checked."""
    rest = ""
    async for piece in response.aiter_text():
        *whole, rest = (rest + piece).split("\n\n")
        for event in whole:
            assert event.startswith(("data: ", ": "))
            yield event
    assert not rest


def body(**wishes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages(), "stream": True, **wishes}


async def chunks(folder: Path, **wishes: Any) -> list[dict[str, Any]]:
    """The parsed chunks of a chat stream that ends well."""
    async with (
        StubWorker(answer=say(TEXT)) as worker,
        served(folder, MemoryPlaces(worker)) as router,
        httpx.AsyncClient(base_url=router.url, timeout=30) as client,
        client.stream("POST", "/v1/chat/completions", json=body(**wishes)) as got,
    ):
        assert got.status_code == 200, await got.aread()
        assert got.headers["content-type"].startswith("text/event-stream")
        found = [event.removeprefix("data: ") async for event in events(got)]
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


async def test_a_chat_stream_is_the_plain_answer(model_folder: Path) -> None:
    async with asked(model_folder) as (client, _):
        stream = await client.chat.completions.create(model=MODEL, messages=messages(), stream=True)
        found = [chunk async for chunk in stream]
    assert found[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in found) == TEXT
    assert found[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in found}) == 1
    assert all(chunk.usage is None for chunk in found)
    assert len(found) > 4, "text comes as it settles"


async def test_every_stream_has_one_request_id_however_many_went_before(model_folder: Path) -> None:
    async with (
        StubWorker(answer=say(TEXT)) as worker,
        served(model_folder, MemoryPlaces(worker)) as router,
        httpx.AsyncClient(base_url=router.url, timeout=30) as client,
    ):
        found = []
        for _ in range(3):
            response = await client.post("/v1/chat/completions", json=body())
            found.append(response.headers.get_list("x-request-id"))
    assert [len(ids) for ids in found] == [1, 1, 1]
    assert len({ids[0] for ids in found}) == 3


async def test_a_completion_stream_is_the_plain_completion(model_folder: Path) -> None:
    async with asked(model_folder) as (client, _):
        stream = await client.completions.create(
            model=MODEL, prompt="x", stream=True, stream_options={"include_usage": True}
        )
        found = [chunk async for chunk in stream]
    assert "".join(c.text for chunk in found for c in chunk.choices) == TEXT
    assert found[-1].choices == []
    assert found[-1].usage.completion_tokens == len(TEXT)


async def test_usage_comes_last_and_alone(model_folder: Path) -> None:
    found = await chunks(model_folder, stream_options={"include_usage": True})
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == len(TEXT)
    assert all(chunk["usage"] is None for chunk in found[:-1])


async def test_usage_comes_with_every_chunk_when_asked(model_folder: Path) -> None:
    found = await chunks(model_folder, stream_options={"continuous_usage_stats": True})
    text = ""
    for chunk in found:
        text += chunk["choices"][0]["delta"].get("content") or ""
        if text:
            assert chunk["usage"]["completion_tokens"] == len(text)
    assert text == TEXT


async def test_commits_come_as_they_happen_beside_text_in_order(model_folder: Path) -> None:
    options = {"include_denoising": True, "include_usage": True}
    found = await chunks(model_folder, max_tokens=96, ignore_eos=True, stream_options=options)
    commits = [
        commit for chunk in found for c in chunk["choices"] for commit in c.get("denoising", ())
    ]
    start = found[-1]["usage"]["prompt_tokens"]
    tokens = {commit["position"] - start: commit["token"] for commit in commits}
    assert sorted(tokens) == list(range(96))
    assert list(tokens) != sorted(tokens)
    assert bytes(tokens[i] for i in range(len(TEXT))).decode() == TEXT
    assert {commit["confidence"] for commit in commits} == {0.95}
    assert [(c["block"], c["step"]) for c in commits[::8]] == [
        (block, step) for block in range(3) for step in range(4)
    ]
    assert {c["text"] for c in commits} >= {"T", " ", "<|endoftext|>"}


async def test_timings_come_with_the_finish_reason(model_folder: Path) -> None:
    found = await chunks(model_folder, stream_options={"include_timings": True})
    assert [bool(chunk.get("sangam")) for chunk in found] == [False] * (len(found) - 1) + [True]
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    assert found[-1]["sangam"]["timings"]["num_blocks"] == 3


async def test_choices_are_interleaved_and_each_ends(model_folder: Path) -> None:
    found = await chunks(model_folder, n=3)
    texts = ["", "", ""]
    for chunk in found:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [TEXT] * 3
    ends = [c["choices"][0]["index"] for c in found if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


async def test_a_silent_stream_is_kept_alive(model_folder: Path) -> None:
    go_on = asyncio.Event()

    async def hold(start: BlockStart, step: int) -> None:
        if step == 1:
            await go_on.wait()

    async with StubWorker(answer=say(TEXT), before_pass=hold) as worker:
        places = MemoryPlaces(worker)
        async with (
            served(model_folder, places, keep_alive_seconds=0.05) as router,
            httpx.AsyncClient() as client,
            client.stream("POST", f"{router.url}/v1/chat/completions", json=body()) as got,
        ):
            found = []
            async for event in events(got):
                found.append(event)
                if event.startswith(": keep-alive"):
                    go_on.set()
    assert ": keep-alive" in found
    assert found[-1] == "data: [DONE]"


async def test_an_error_before_the_first_byte_is_a_status(model_folder: Path) -> None:
    places = MemoryPlaces(patience_seconds=0.1)
    async with served(model_folder, places) as router, router.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages(), stream=True)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "3"


async def test_the_status_is_held_until_patience_with_the_fleet_has_surely_ended(
    model_folder: Path,
) -> None:
    """Patience ends a little after its time, and a stream is looked at in the meantime."""
    places = MemoryPlaces(patience_seconds=1.2)
    seconds = {"no_worker_seconds": 0.5, "keep_alive_seconds": 1.0}
    async with served(model_folder, places, **seconds) as router, router.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages(), stream=True)
    assert caught.value.status_code == 503


async def test_an_error_after_the_first_byte_is_an_event_and_never_a_silent_end(
    model_folder: Path,
) -> None:
    async def breaks(start: BlockStart, step: int) -> None:
        if start.key.block == 1:
            raise ConnectionBreaks

    worker = StubWorker(answer=say(TEXT), before_pass=breaks)
    async with asked(model_folder, worker, max_lost=1) as (client, _):
        text, error = await read_until_error(client)
    assert text == TEXT[:32]
    assert "lost blocks" in error.message


async def read_until_error(client: AsyncOpenAI) -> tuple[str, openai.APIError]:
    """The text of a stream before its error event."""
    stream = await client.chat.completions.create(model=MODEL, messages=messages(), stream=True)
    text = ""
    try:
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    except openai.APIError as error:
        return text, error
    raise AssertionError(f"the stream ended without an error, after {text!r}")


async def test_a_deadline_after_the_first_byte_is_an_event(model_folder: Path) -> None:
    async def hang(start: BlockStart, step: int) -> None:
        if start.key.block == 1:
            await asyncio.Event().wait()

    worker = StubWorker(answer=say(TEXT), before_pass=hang)
    async with asked(model_folder, worker, request_seconds=0.5) as (client, _):
        _, error = await read_until_error(client)
    assert error.code == "deadline_exceeded"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_goes_away_frees_everything(
    model_folder: Path, is_stream: bool
) -> None:
    reached = asyncio.Event()

    async def hang(start: BlockStart, step: int) -> None:
        if start.key.block == 1:
            reached.set()
            await asyncio.Event().wait()

    async with StubWorker(answer=say(TEXT), before_pass=hang) as worker:
        places = MemoryPlaces(worker)
        async with served(model_folder, places) as router:
            async with router.client() as client:
                asking = asyncio.create_task(
                    client.chat.completions.create(
                        model=MODEL, messages=messages(), stream=is_stream
                    )
                )
                await asyncio.wait_for(reached.wait(), 5)
                if is_stream:
                    await (await asking).close()
                else:
                    asking.cancel()
                    await asyncio.wait({asking})
            await worker.until_idle()
            await places.until(lambda: places.is_empty)
            cancelled = {"outcome": "cancelled"}
            counted = router.metrics.registry.get_sample_value("sangam_requests_total", cancelled)
            assert counted == 1
        assert len(worker.dropped) == 1


async def test_one_choice_that_fails_ends_the_others(model_folder: Path) -> None:
    failed = asyncio.Event()

    async def hook(start: BlockStart, step: int) -> None:
        if start.key.request_id.endswith("-1"):
            failed.set()
            raise ConnectionBreaks
        await asyncio.Event().wait()

    worker = StubWorker(answer=say(TEXT), before_pass=hook)
    async with asked(model_folder, worker, max_lost=0) as (client, _):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=MODEL, messages=messages(), n=2)
    assert failed.is_set()
