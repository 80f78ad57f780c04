"""Answers of the public API as the official client reads them, over real sockets."""

from pathlib import Path

from tests.router.builders import MODEL, served
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import StubWorker, say

TEXT = "The cat sat on the mat, and the dog lay by the door all day. Then it rained."


def messages(text: str = "Where did the cat sit?") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_chat_answer_comes_whole(model_folder: Path) -> None:
    async with StubWorker(answer=say(TEXT)) as worker:
        places = MemoryPlaces(worker)
        async with served(model_folder, places) as router, router.client() as client:
            answer = await client.chat.completions.create(model=MODEL, messages=messages())
    choice = answer.choices[0]
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(TEXT)
    assert places.is_empty


async def test_a_streamed_chat_answer_is_the_plain_one(model_folder: Path) -> None:
    async with StubWorker(answer=say(TEXT)) as worker:
        async with served(model_folder, MemoryPlaces(worker)) as router, router.client() as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages(), stream=True
            )
            chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
