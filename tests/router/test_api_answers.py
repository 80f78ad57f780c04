"""Answers of the public API as the official client reads them, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from tests.router.builders import MODEL, served
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import StubWorker, say

from sangam_core.wire import BlockStart

TEXT = "The cat sat on the mat, and the dog lay by the door all day. Then it rained."


def messages(text: str = "Where did the cat sit?") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@asynccontextmanager
async def asked(
    folder: Path, worker: StubWorker | None = None, **settings: Any
) -> AsyncIterator[tuple[AsyncOpenAI, StubWorker]]:
    """A client of a router with one worker, which says ``TEXT`` unless told otherwise."""
    worker = worker or StubWorker(answer=say(TEXT))
    async with worker:
        places = MemoryPlaces(worker)
        async with served(folder, places, **settings) as router, router.client() as client:
            yield client, worker
        assert places.is_empty


def by_prompt(start: BlockStart) -> list[int]:
    """An answer that repeats the prompt."""
    prompt = bytes(i for i in start.ids[: start.geometry.prompt_tokens] if i < 256)
    return say(prompt.decode())(start)


def by_seed(start: BlockStart) -> list[int]:
    return say(f"seed {start.decoding.seed}")(start)


async def test_a_chat_answer_comes_whole(model_folder: Path) -> None:
    async with asked(model_folder) as (client, _):
        answer = await client.chat.completions.create(model=MODEL, messages=messages())
    choice = answer.choices[0]
    assert choice.message.content == TEXT
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.usage.completion_tokens == len(TEXT)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(TEXT)


async def test_a_completion_is_the_raw_prompt_going_on(model_folder: Path) -> None:
    async with asked(model_folder, StubWorker(answer=by_prompt)) as (client, worker):
        answer = await client.completions.create(model=MODEL, prompt="once upon", max_tokens=32)
    assert answer.choices[0].text == "once upon"
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len("once upon")
    assert worker.starts[0].ids[:9] == tuple(b"once upon")


async def test_prompts_may_be_token_ids(model_folder: Path) -> None:
    async with asked(model_folder, StubWorker(answer=by_prompt)) as (client, _):
        one = await client.completions.create(model=MODEL, prompt=[104, 105], max_tokens=32)
        two = await client.completions.create(model=MODEL, prompt=[[97], [98, 99]], max_tokens=32)
    assert one.choices[0].text == "hi"
    assert [choice.text for choice in two.choices] == ["a", "bc"]


async def test_each_prompt_and_choice_is_an_answer_of_its_own(model_folder: Path) -> None:
    async with asked(model_folder, StubWorker(answer=by_prompt)) as (client, worker):
        answer = await client.completions.create(
            model=MODEL, prompt=["one", "three"], n=2, max_tokens=32, seed=5
        )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == ["one", "one", "three", "three"]
    assert answer.usage.prompt_tokens == len("one") + len("three"), "a prompt counts once"
    assert answer.usage.completion_tokens == 2 * (3 + 5)
    seeds = sorted(start.decoding.seed for start in worker.starts)
    assert len(set(seeds)) == 2
    assert seeds.count(5) == 2, "the first choice has the seed itself"


async def test_the_same_seed_asks_for_the_same_answer(model_folder: Path) -> None:
    async with asked(model_folder, StubWorker(answer=by_seed)) as (client, _):

        async def texts(**wishes: Any) -> list[str]:
            made = await client.chat.completions.create(
                model=MODEL, messages=messages(), n=3, **wishes
            )
            return [choice.message.content or "" for choice in made.choices]

        assert await texts(seed=2**63 - 1) == await texts(seed=2**63 - 1)
        assert await texts(seed=None) != await texts()


async def test_the_length_ends_an_answer(model_folder: Path) -> None:
    async with asked(model_folder) as (client, _):
        for wish in ({"max_tokens": 10}, {"max_completion_tokens": 10}):
            answer = await client.chat.completions.create(model=MODEL, messages=messages(), **wish)
            assert answer.choices[0].message.content == TEXT[:10]
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage.completion_tokens == 10


@pytest.mark.parametrize("stop", [" the", [" the"], ["zzz", " the mat", "\nuser:", " the"]])
async def test_a_stop_string_ends_an_answer(model_folder: Path, stop: Any) -> None:
    async with asked(model_folder) as (client, _):
        answer = await client.chat.completions.create(model=MODEL, messages=messages(), stop=stop)
    assert answer.choices[0].message.content == "The cat sat on"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("The cat sat on the")


async def test_an_ignored_end_gives_exactly_max_tokens(model_folder: Path) -> None:
    async with asked(model_folder, StubWorker(answer=say("hi"))) as (client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages(), max_tokens=50, extra_body={"ignore_eos": True}
        )
    assert answer.choices[0].message.content == "hi"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 50


async def test_content_may_be_text_parts(model_folder: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    async with asked(model_folder, StubWorker(answer=by_prompt)) as (client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "name": "ann", "content": parts}]
        )
    assert "one\ntwo" in (answer.choices[0].message.content or "")


async def test_an_answer_may_be_sent_back_as_it_came(model_folder: Path) -> None:
    async with asked(model_folder) as (client, _):
        first = await client.chat.completions.create(model=MODEL, messages=messages())
        again = [*messages(), first.choices[0].message.model_dump(), *messages("Why?")]
        second = await client.chat.completions.create(model=MODEL, messages=again)
    assert second.choices[0].message.content == TEXT


async def test_the_model_can_be_looked_up(model_folder: Path) -> None:
    async with asked(model_folder, served_model_name="org/model") as (client, _):
        listed = [model async for model in client.models.list()]
        found = await client.models.retrieve("org/model")
    assert [model.id for model in listed] == ["org/model"]
    assert found.owned_by == "sangam"


async def test_extensions_reach_the_worker(model_folder: Path) -> None:
    async with asked(model_folder) as (client, worker):
        for wishes in (
            {"unmasking": {"rule": "fixed", "steps": 8}, "cache": "prefix", "top_k": 5},
            {"unmasking": "factor", "temperature": 0.5},
            {"confidence_threshold": 0.5},
            {},
        ):
            await client.chat.completions.create(
                model=MODEL,
                messages=messages(),
                max_tokens=8,
                extra_body={"temperature": 0, "top_p": 0.9} | wishes,
            )
    first, second, third, fourth = (start.decoding for start in worker.starts)
    assert (first.unmasking.rule, first.unmasking.steps) == ("fixed", 8)
    assert (first.cache, first.top_k, first.top_p) == ("prefix", 5, 0.9)
    assert second.unmasking.rule == "factor"
    assert (third.unmasking.rule, third.unmasking.threshold) == ("threshold", 0.5)
    assert (fourth.unmasking.rule, fourth.unmasking.threshold) == ("threshold", 0.9)
    assert (fourth.temperature, fourth.cache) == (0.0, "dual")


async def test_a_fixed_mask_buffer_is_everybodys(model_folder: Path) -> None:
    async with asked(model_folder, fixed_mask_buffer_tokens=128) as (client, worker):
        await client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=8)
    assert worker.starts[0].geometry.num_blocks == 4


async def test_an_unstated_length_gives_way_to_the_prompt(model_folder: Path) -> None:
    prompt = [104] * 960
    async with asked(model_folder) as (client, worker):
        await client.completions.create(model=MODEL, prompt=prompt)
    assert worker.starts[0].geometry.num_blocks == 2, "64 of 1024 tokens are left"


async def test_timings_tell_where_the_time_went(model_folder: Path) -> None:
    async with asked(model_folder) as (client, _):
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages(), extra_body={"include_timings": True}
        )
        several = await client.chat.completions.create(
            model=MODEL, messages=messages(), n=2, extra_body={"include_timings": True}
        )
    timings = answer.sangam["timings"]
    assert timings["num_blocks"] == 3
    assert 9 <= timings["num_steps"] <= 12
    assert sum(len(block) for block in timings["commit_counts"]) == timings["num_steps"]
    assert len(timings["commit_counts"]) == 3
    assert timings["queueing_seconds"] == timings["prefill_queueing_seconds"] >= 0.003
    assert timings["decode_queueing_seconds"] == 0
    assert timings["placements"] == [["w"]] * 3
    assert timings["prefill_seconds"] == pytest.approx(0.006)
    assert timings["decode_seconds"] == pytest.approx(0.004 * (timings["num_steps"] - 3))
    assert 0 < timings["first_token_seconds"] <= timings["latency_seconds"]
    assert len(several.sangam["timings_of_choice"]) == 2
