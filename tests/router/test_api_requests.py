"""What the public API lets in, and what it refuses by name."""

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.router.builders import MODEL, served, write_model_folder
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import StubWorker, say
from tests.router.test_api_answers import messages
from tests.router.test_tokenizer import write_settings

from sangam_core.placement import Role

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def post(
    folder: Path, path: str, content: Any, worker: StubWorker | None = None, **settings: Any
) -> httpx.Response:
    """One request to a router with one worker."""
    raw = content if isinstance(content, bytes | str) else json.dumps(content)
    async with worker or StubWorker(answer=say("hello")) as started:
        places = MemoryPlaces(started)
        async with (
            served(folder, places, **settings) as router,
            httpx.AsyncClient(base_url=router.url, timeout=30) as client,
        ):
            return await client.post(path, content=raw)


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages(), **changes}


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **changes}


def assert_refused(response: httpx.Response, param: str | None, status: int = 400) -> None:
    """The error is OpenAI's, and names the parameter."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert error["code"], error
    assert param is None or param in error["message"]


NEUTRAL_CHAT = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": False,
    "top_logprobs": None,
    "seed": None,
    "n": 1,
    "top_p": 1,
    "temperature": 0,
    "tools": None,
    "tool_choice": None,
    "parallel_tool_calls": None,
    "response_format": {"type": "text"},
    "logit_bias": {},
    "stop": None,
    "user": "somebody",
    "stream": False,
    "stream_options": None,
    "max_tokens": 32,
    "max_completion_tokens": 32,
    "best_of": 1,
    "use_beam_search": False,
    "min_p": 0,
    "top_k": -1,
    "metadata": None,
    "store": False,
    "modalities": ["text"],
    "service_tier": "auto",
    "echo": False,
    "guided_json": None,
    "priority": 0,
    "reasoning_effort": None,
    "unmasking": None,
    "confidence_threshold": None,
    "ignore_eos": False,
    "cache": None,
}


@pytest.mark.parametrize("name", sorted(NEUTRAL_CHAT))
async def test_neutral_values_are_let_in(model_folder: Path, name: str) -> None:
    response = await post(model_folder, CHAT, chat(**{name: NEUTRAL_CHAT[name]}))
    assert response.status_code == 200, response.text


async def test_all_neutral_values_at_once_are_let_in(model_folder: Path) -> None:
    assert (await post(model_folder, CHAT, chat(**NEUTRAL_CHAT))).status_code == 200


async def test_what_benchmark_clients_send_is_let_in(model_folder: Path) -> None:
    body = completion(
        temperature=0.0,
        repetition_penalty=1.0,
        max_tokens=8,
        max_completion_tokens=8,
        logprobs=None,
        stop=["\nuser:"],
        ignore_eos=True,
        echo=False,
        suffix=None,
        seed=2**63 - 1,
    )
    assert (await post(model_folder, COMPLETIONS, body)).status_code == 200


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"best_of": 2}, "best_of"),
        ({"colour": "blue"}, "colour"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"max_tokens": 8, "max_completion_tokens": 9}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"colour": True}}, "stream_options.colour"),
        ({"user": 5}, "user"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"cache": "huge"}, "cache"),
        ({"confidence_threshold": 1.5}, "confidence_threshold"),
        ({"confidence_threshold": 0.5, "unmasking": "fixed"}, "confidence_threshold"),
        ({"unmasking": "magic"}, "unmasking"),
        ({"unmasking": 5}, "unmasking"),
        ({"unmasking": {"rule": "magic"}}, "unmasking.rule"),
        ({"unmasking": {"threshold": 2}}, "unmasking.threshold"),
        ({"unmasking": {"threshold": "0.5"}}, "unmasking.threshold"),
        ({"unmasking": {"rule": "fixed", "steps": 0}}, "unmasking.steps"),
        ({"unmasking": {"rule": "fixed", "threshold": 0.5}}, "unmasking.threshold"),
        ({"unmasking": {"rule": "confidence_threshold", "eps": 0.1}}, "unmasking.eps"),
        ({"unmasking": {"rule": "fixed", "colour": 1}}, "unmasking.colour"),
        ({"unmasking": "entropy"}, "unmasking"),
        ({"confidence_threshold": 0.5, "steps": 8}, "steps"),
        ({"unmasking": {"rule": "confidence_threshold", "steps": 8}}, "unmasking.steps"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5, "temperature": None}, "top_k"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0.colour"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages.0.tool_calls",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        ({"model": None}, "model"),
    ],
)
async def test_what_a_chat_cannot_have_is_refused_by_name(
    model_folder: Path, wish: dict[str, Any], param: str
) -> None:
    assert_refused(await post(model_folder, CHAT, chat(**wish)), param)


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [288]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [104, 261]}, "prompt"),
        ({"prompt": "hi <|mdm_mask|>"}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt.1"),
        ({"prompt": [[104], [104, 288]]}, "prompt.1"),
        ({"prompt": ["x" * 1000, "x"]}, "prompt.0"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "x" * 1000}, "prompt"),
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_a_completion_cannot_have_is_refused_by_name(
    model_folder: Path, wish: dict[str, Any], param: str
) -> None:
    assert_refused(await post(model_folder, COMPLETIONS, completion(**wish)), param)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "null",
        '{"model": NaN}',
        b"\xff\xfe",
        "[" * 100_000,
        '{"model": "\\ud800"}',
        '{"model": "\\uDFff"}',
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(
    model_folder: Path, content: bytes | str
) -> None:
    assert_refused(await post(model_folder, CHAT, content), None)


@pytest.mark.parametrize(
    ("wish", "hint"),
    [
        ({"max_token": 8}, "did you mean max_tokens?"),
        ({"message": []}, "did you mean messages?"),
        ({"steps": 8}, 'unmasking, e.g. {"rule": "fixed", "steps": 8}'),
        ({"stream": True, "stream_options": {"included_usage": True}}, "mean include_usage?"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "unknown field"),
    ],
)
async def test_a_field_that_there_is_not_comes_with_what_may_be_meant(
    model_folder: Path, wish: dict[str, Any], hint: str
) -> None:
    response = await post(model_folder, CHAT, chat(**wish))
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith(hint)


LONG_NAME = "x" * 1_000_000


@pytest.mark.parametrize(
    "wish",
    [
        {LONG_NAME: 1},
        {"model": LONG_NAME},
        {"messages": [{"role": "user", "content": "x", LONG_NAME: 1}]},
        {"messages": [{"role": "user", "content": [{"type": LONG_NAME}]}]},
        {"stream": True, "stream_options": {LONG_NAME: True}},
        {"unmasking": LONG_NAME},
        {"unmasking": {LONG_NAME: 1}},
    ],
)
async def test_what_a_client_wrote_is_repeated_in_few_characters(
    model_folder: Path, wish: dict[str, Any]
) -> None:
    response = await post(model_folder, CHAT, chat(**wish))
    assert response.status_code in (400, 404)
    error = response.json()["error"]
    assert len(error["message"]) <= 1000
    assert len(error["param"]) <= 100
    assert "xxx" in error["message"]


async def test_a_long_message_keeps_its_end_which_says_what_to_do(model_folder: Path) -> None:
    response = await post(model_folder, CHAT, chat(model=LONG_NAME))
    assert response.json()["error"]["message"].endswith(f"does not exist here; use {MODEL!r}")


async def test_half_a_character_in_a_prompt_is_refused_and_a_whole_one_is_not(
    model_folder: Path,
) -> None:
    whole = json.dumps(completion(prompt="🙂", max_tokens=8))
    assert "\\ude42" in whole
    half = whole.replace("\\ude42", "")
    assert (await post(model_folder, COMPLETIONS, half)).status_code == 400
    assert (await post(model_folder, COMPLETIONS, whole)).status_code == 200


async def test_another_model_does_not_exist(model_folder: Path) -> None:
    response = await post(model_folder, CHAT, chat(model="gpt-5"))
    assert_refused(response, "model", 404)
    assert response.json()["error"]["code"] == "model_not_found"


async def test_a_model_without_a_template_refuses_chats(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m")
    write_settings(folder)
    response = await post(folder, CHAT, chat())
    assert_refused(response, "messages")
    assert "no chat template" in response.json()["error"]["message"]


async def test_a_mask_token_spelled_in_a_message_is_harmless_text(model_folder: Path) -> None:
    response = await post(model_folder, CHAT, chat(messages=messages("What is <|mdm_mask|>?")))
    assert response.status_code == 200


async def test_no_cache_needs_a_colocated_worker(model_folder: Path) -> None:
    worker = StubWorker("d", Role.DECODE)
    assert_refused(await post(model_folder, CHAT, chat(cache="none"), worker), "cache")


async def test_dream_takes_its_own_rules_and_one_block_without_a_cache(tmp_path: Path) -> None:
    folder = write_model_folder(
        tmp_path / "m", architectures=["DreamModel"], max_position_embeddings=1024
    )
    worker = StubWorker(answer=say("hi"))
    body = chat(unmasking={"rule": "entropy", "steps": 8}, cache="none", max_tokens=96)
    assert (await post(folder, CHAT, body, worker)).status_code == 200
    start = worker.starts[0]
    assert (start.geometry.num_blocks, start.geometry.block_length) == (1, 96)
    assert start.decoding.unmasking.rule == "entropy"


async def test_a_compressed_body_is_refused_by_its_encoding(model_folder: Path) -> None:
    content = gzip.compress(json.dumps(chat()).encode())
    async with (
        served(model_folder, MemoryPlaces()) as router,
        httpx.AsyncClient(base_url=router.url, timeout=30) as client,
    ):
        packed = await client.post(CHAT, content=content, headers={"content-encoding": "gzip"})
    assert_refused(packed, None, 415)
    assert "Content-Encoding 'gzip'" in packed.json()["error"]["message"]


async def test_an_empty_body_is_told_so(model_folder: Path) -> None:
    response = await post(model_folder, CHAT, " \n")
    assert_refused(response, None)
    assert "body is empty" in response.json()["error"]["message"]


async def test_more_than_the_pools_hold_is_refused_at_once(model_folder: Path) -> None:
    async with StubWorker() as worker:
        places = MemoryPlaces(worker, total_pages=6)
        async with served(model_folder, places) as router, httpx.AsyncClient() as client:
            response = await client.post(router.url + CHAT, json=chat(max_tokens=64))
    assert_refused(response, "max_tokens")
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param", "told"),
    [
        (30, 65, "max_tokens", "30 prompt tokens and 96 for the answer (whole blocks of 32)"),
        (30, 65, "max_tokens", "the 96 tokens that this server's workers take (the model 1024)"),
        (30, 65, "max_tokens", "lower max_tokens to 64 or less"),
        (65, 32, "prompt", "shorten the prompt to 64 tokens or less"),
        (65, None, "prompt", "shorten the prompt to 64 tokens or less"),
    ],
)
async def test_what_no_worker_takes_is_told_with_numbers_and_what_would_fit(
    model_folder: Path, num_prompt: int, max_tokens: int | None, param: str, told: str
) -> None:
    async with StubWorker(answer=say("hi")) as worker:
        places = MemoryPlaces(worker, total_pages=6)
        async with served(model_folder, places) as router, httpx.AsyncClient() as client:

            async def ask(prompt: int, most: int | None) -> httpx.Response:
                body = {"model": MODEL, "prompt": [5] * prompt, "max_tokens": most}
                return await client.post(router.url + COMPLETIONS, json=body)

            refused = await ask(num_prompt, max_tokens)
            heeded = await ask(min(num_prompt, 64), 64 if num_prompt == 30 else max_tokens)
    assert_refused(refused, param)
    assert told in refused.json()["error"]["message"]
    assert heeded.status_code == 200
