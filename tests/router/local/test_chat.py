"""``sangam chat`` against a router that is played by a small server."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from sangam_router.local.chat import ChatError, ChatOptions, chat

MODELS = '{"data": [{"id": "a-model"}]}'
TIMINGS = {"latency_seconds": 0.012, "prefill_seconds": 0.004, "num_steps": 2}


def chunk(text: str, settled: int, **fields: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
        "usage": {"prompt_tokens": 5, "completion_tokens": settled},
        **fields,
    }


ANSWER = [chunk("17 + 25", 7), chunk(" = 42", 12, sangam={"timings": TIMINGS})]


class Router(ThreadingHTTPServer):
    """Answers every question with the same chunks, and keeps what it was asked."""

    def __init__(self, chunks: list[dict[str, Any]], status: int, models: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.chunks = chunks
        self.status = status
        self.models = models
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Router

    def log_message(self, *arguments: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        self._reply(200, self.server.models.encode())

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.server.asked.append(json.loads(self.rfile.read(length)))
        if self.server.status != 200:
            self._reply(self.server.status, b'{"error": {"message": "the line is full"}}')
            return
        events = [f"data: {json.dumps(item)}\n\n" for item in self.server.chunks]
        self._reply(200, "".join([*events, "data: [DONE]\n\n"]).encode())

    def _reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def router(
    chunks: list[dict[str, Any]] = ANSWER, status: int = 200, models: str = MODELS
) -> Iterator[Router]:
    server = Router(chunks, status, models)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def talk(url: str, typed: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """Feed lines through a pipe; returns what comes out of stdout."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    out = io.StringIO()
    chat(ChatOptions(url=url, **options), Console(file=out))
    return out.getvalue()


def test_a_piped_question_gets_its_answer_alone_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with router() as server:
        assert talk(server.url, "What is 17 + 25?\n", monkeypatch) == "17 + 25 = 42\n"
    told = capsys.readouterr().err
    assert "12 tokens in 2 passes (6.0 a pass), 12 ms in all, 4 ms prefill" in told


def test_a_short_answer_is_told_in_the_singular(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = [chunk("4", 1, sangam={"timings": {**TIMINGS, "num_steps": 1}})]
    with router(chunks) as server:
        talk(server.url, "2 + 2\n", monkeypatch)
    assert "1 token in 1 pass, 12 ms in all" in capsys.readouterr().err


def test_it_asks_the_served_model_for_the_commits_as_they_happen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with router() as server:
        talk(server.url, "Hello\n", monkeypatch)
    (asked,) = server.asked
    assert asked["model"] == "a-model"
    assert asked["stream"] is True
    assert asked["stream_options"]["include_denoising"] is True


def test_earlier_turns_go_along_up_to_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with router() as server:
        talk(server.url, "one\ntwo\nthree\n", monkeypatch, num_earlier_turns=1)
    said = [[message["content"] for message in asked["messages"]] for asked in server.asked]
    assert said[0] == ["one"]
    assert said[1] == ["one", "17 + 25 = 42", "two"]
    assert said[2] == ["two", "17 + 25 = 42", "three"]


def test_all_earlier_turns_go_along_while_there_are_fewer_than_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with router() as server:
        talk(server.url, "one\ntwo\nthree\nfour\n", monkeypatch, num_earlier_turns=5)
    asked = [[message["content"] for message in asked["messages"]] for asked in server.asked]
    assert [said[::2] for said in asked] == [
        ["one"],
        ["one", "two"],
        ["one", "two", "three"],
        ["one", "two", "three", "four"],
    ]


def test_no_earlier_turn_goes_along_when_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with router() as server:
        talk(server.url, "one\ntwo\n", monkeypatch, num_earlier_turns=0)
    assert [len(asked["messages"]) for asked in server.asked] == [1, 1]


def test_a_refusal_is_told_in_the_router_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(status=429) as server, pytest.raises(ChatError, match="429: the line is full"):
        talk(server.url, "Hello\n", monkeypatch)


def test_an_error_in_the_stream_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [chunk("17", 2), {"error": {"message": "gave up after 17 lost blocks"}}]
    with router(broken) as server, pytest.raises(ChatError, match="gave up after 17 lost blocks"):
        talk(server.url, "Hello\n", monkeypatch)


def test_an_empty_line_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with router() as server:
        assert talk(server.url, "\n\n", monkeypatch) == ""
    assert server.asked == []


def test_another_server_at_that_address_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(models="<html>") as server, pytest.raises(ChatError, match="does not speak"):
        talk(server.url, "Hello\n", monkeypatch)


def test_exit_leaves_before_what_follows_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with router() as server:
        assert talk(server.url, "one\n/exit\ntwo\n", monkeypatch) == "17 + 25 = 42\n"
    assert len(server.asked) == 1


def test_on_a_terminal_it_says_first_how_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Typed("/exit\n"))
    out = io.StringIO()
    with router() as server:
        chat(ChatOptions(url=server.url), Console(file=out, force_terminal=True, highlight=False))
    told = out.getvalue()
    assert "Ctrl-D" in told
    assert "/exit" in told


def test_a_missing_key_is_told_with_the_option_that_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with router(status=401) as server, pytest.raises(ChatError, match=r"--api-key or SANGAM_API"):
        talk(server.url, "Hello\n", monkeypatch)
