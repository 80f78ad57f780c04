"""`helm test`'s hook: what it is in the cluster, and what its question makes of answers."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.chart.helm import CHART, EVERYTHING, Helm, Rendered

SCRIPT = CHART / "files" / "ask.py"
Reply = tuple[int, str]


def whole(text: str = "17 + 25 = 42", **changes: Any) -> Reply:
    answer = {
        "object": "chat.completion",
        "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 12},
    }
    return 200, json.dumps(answer | changes)


def streamed(*texts: str, end: str = "data: [DONE]\n\n") -> Reply:
    chunks: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts
    ]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    return 200, "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


GOOD = (whole(), streamed("17 + 25", " = 42"))


class Service(ThreadingHTTPServer):
    """Gives the replies one after the other; keeps what was asked."""

    replies: list[Reply]
    asked: list[tuple[dict[str, str], dict[str, Any]]]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        service = self.server
        assert isinstance(service, Service)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        service.asked.append((dict(self.headers), body))
        status, text = service.replies.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Be quiet."""


@contextmanager
def service(*replies: Reply) -> Iterator[Service]:
    server = Service(("127.0.0.1", 0), _Handler)
    server.replies, server.asked = list(replies), []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(port: int, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "ASK_URL": f"http://127.0.0.1:{port}",
        "ASK_MODEL": "sangam-small",
        "ASK_SECONDS": "20",
        "ASK_EXPECT": "42",
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.read_text("utf-8")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_right_answer_whole_and_streamed_passes() -> None:
    with service(*GOOD) as server:
        done = ask(server.server_port)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("What is 17 + 25? -> 17 + 25 = 42") == 2
    assert [body["stream"] for _, body in server.asked] == [False, True]
    assert {body["model"] for _, body in server.asked} == {"sangam-small"}


def test_a_service_that_is_starting_is_asked_again() -> None:
    with service((503, "{}"), *GOOD) as server:
        done = ask(server.server_port)
    assert done.returncode == 0, done.stderr
    assert len(server.asked) == 3


def test_the_first_of_the_api_keys_is_sent() -> None:
    with service(*GOOD) as server:
        assert ask(server.server_port, ASK_API_KEYS="one,two").returncode == 0
    assert [headers["Authorization"] for headers, _ in server.asked] == ["Bearer one"] * 2


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ([whole("17 + 25 = 41")], "got '17 + 25 = 41'"),
        ([whole(" ")], "got ' '"),
        ([(200, "<html>")], "malformed answer"),
        ([whole(object="error")], "malformed answer"),
        ([whole(usage={"completion_tokens": 0})], "malformed answer"),
        ([whole(choices=[])], "malformed answer"),
        ([(401, "no key")], "HTTP 401: no key"),
        ([whole(), streamed("42", end="")], "the stream has no end"),
        ([whole(), streamed("41")], "got '41'"),
        ([whole(), (200, 'data: {"error": {}}\n\ndata: [DONE]\n\n')], "holds an error"),
    ],
)
def test_anything_else_fails_and_says_why(replies: list[Reply], words: str) -> None:
    with service(*replies) as server:
        done = ask(server.server_port)
    assert done.returncode == 1
    assert words in done.stderr


def test_nobody_there_ends_at_the_deadline() -> None:
    with service() as server:
        port = server.server_port
    done = ask(port, ASK_SECONDS="1")
    assert done.returncode == 1
    assert "no answer in time" in done.stderr


def test_the_hook_asks_the_service_with_the_routers_image(default: Rendered) -> None:
    (pod,) = default.of("Pod")
    annotations = pod["metadata"]["annotations"]
    assert annotations["helm.sh/hook"] == "test"
    policies = set(annotations["helm.sh/hook-delete-policy"].split(","))
    assert policies == {"before-hook-creation", "hook-succeeded", "hook-failed"}
    (container,) = pod["spec"]["containers"]
    assert container["command"][2].strip() == SCRIPT.read_text("utf-8").strip()
    router = default.one("Deployment", "sangam-router")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == router["image"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["ASK_URL"] == "http://sangam-router.serving.svc:80"
    assert variables["ASK_EXPECT"] == "42"
    assert float(variables["ASK_SECONDS"] or 0) < pod["spec"]["activeDeadlineSeconds"] < 300


def test_the_hook_is_behind_no_service(everything: Rendered) -> None:
    (pod,) = everything.of("Pod")
    labels = pod["metadata"]["labels"]
    for each in everything.of("Service"):
        assert not each["spec"]["selector"].items() <= labels.items()


def test_other_models_need_only_answer_and_keys_are_used(helm: Helm) -> None:
    (pod,) = helm.render(EVERYTHING).of("Pod")
    variables = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
    assert "ASK_EXPECT" not in variables
    assert variables["ASK_API_KEYS"]["valueFrom"]["secretKeyRef"]["name"] == "keys"
    with service(*GOOD) as server:
        assert ask(server.server_port, ASK_EXPECT="").returncode == 0


def test_the_hook_can_be_switched_off(helm: Helm) -> None:
    assert helm.render(None, "tests.enabled=false").of("Pod") == []
