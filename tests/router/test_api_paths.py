"""The public API's paths and methods, and the id that every answer carries."""

from pathlib import Path

import httpx
import pytest
from tests.router.builders import MODEL, served
from tests.router.memory_places import MemoryPlaces
from tests.router.stub_worker import StubWorker, say
from tests.router.test_api_requests import CHAT, assert_refused, chat, post


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/models", "/metrics", "/docs", "/readyz"])
async def test_the_public_port_has_nothing_else(model_folder: Path, path: str) -> None:
    assert_refused(await post(model_folder, path, {}), None, 404)


async def test_a_wrong_path_is_told_what_there_is(model_folder: Path) -> None:
    response = await post(model_folder, "/chat/completions", chat())
    assert_refused(response, None, 404)
    assert "there are POST /v1/chat/completions" in response.json()["error"]["message"]


async def test_a_wrong_method_is_refused_with_the_right_one(model_folder: Path) -> None:
    response = await post(model_folder, "/v1/models", {})
    assert_refused(response, None, 405)
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}
    assert "POST /v1/models is not allowed; use " in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", f"/v1/models/{MODEL}"])
async def test_what_can_be_looked_at_answers_a_head_request(model_folder: Path, path: str) -> None:
    async with (
        served(model_folder, MemoryPlaces()) as router,
        httpx.AsyncClient(base_url=router.url, timeout=30) as client,
    ):
        response = await client.head(path)
    assert (response.status_code, response.content) == (200, b"")


async def test_the_request_id_comes_back(model_folder: Path) -> None:
    async with StubWorker(answer=say("hi")) as worker:
        places = MemoryPlaces(worker)
        async with (
            served(model_folder, places) as router,
            httpx.AsyncClient(base_url=router.url, timeout=30) as client,
        ):
            given = await client.post(CHAT, json=chat(), headers={"x-request-id": "abc-1"})
            refused = await client.post(CHAT, json={}, headers={"x-request-id": "abc-2"})
            made = await client.get("/healthz", headers={"x-request-id": "not an id"})
    assert given.headers["x-request-id"] == "abc-1"
    assert refused.headers["x-request-id"] == "abc-2"
    assert made.headers["x-request-id"].startswith("req-")
