"""The client sends when requests are due, tells failures apart, and says when it is too slow."""

import asyncio
import json
import os
import signal
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from tests.loadtest.stub import Handler, event, serving, stream_of

from sangam_core.errors import ConfigurationError
from sangam_loadtest.arrivals import ArrivalProcess, Arrivals
from sangam_loadtest.client.bodies import FIRST_ID, LAST_ID, Bodies, Body, BodyOptions
from sangam_loadtest.client.exchange import EventReader
from sangam_loadtest.client.health import LATE_SECONDS, ClientHealth
from sangam_loadtest.client.open_loop import INTERRUPTED, Progress, Target, send_all
from sangam_loadtest.load import Load, planned
from sangam_loadtest.records import RequestRecord, read_records
from sangam_loadtest.run import RunOptions, RunResult, TargetError, run
from sangam_loadtest.traces.request import TraceRequest
from sangam_loadtest.traces.source import TraceSpec

LOAD = Load(TraceSpec("sharegpt"), Arrivals(ArrivalProcess.CONSTANT, 50.0), num_requests=5)
QUIET = Console(quiet=True)
STALL_SECONDS = 0.3


def options(url: str, **changes: Any) -> RunOptions:
    timeout = changes.pop("timeout_seconds", 10.0)
    of_load = {item.name: changes.pop(item.name) for item in fields(Load) if item.name in changes}
    return RunOptions(replace(LOAD, **of_load), Target((url,), timeout_seconds=timeout), **changes)


def run_against(
    handler: Handler, path: Path | None = None, **changes: Any
) -> tuple[RunResult, list[dict[str, Any]], list[str]]:
    with serving(handler) as served:
        result = run(options(served.url, **changes), QUIET, path)
    return result, served.bodies, served.paths


async def answering(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream_of(request, body, "a few", " words")


# -- what is sent -------------------------------------------------------------------------------


def test_requests_of_lengths_are_token_ids_of_that_many_tokens() -> None:
    result, bodies, paths = run_against(answering)
    assert result.summary.num_completed == 5
    assert result.model == "stub-model"
    assert set(paths) == {"/v1/completions"}
    wanted = {(d.request.prompt_tokens, d.request.output_tokens) for d in planned(LOAD)}
    assert {(len(body["prompt"]), body["max_tokens"]) for body in bodies} == wanted
    assert all(FIRST_ID <= i <= LAST_ID for body in bodies for i in body["prompt"])
    assert all(body["ignore_eos"] for body in bodies)
    assert len({tuple(body["prompt"][:4]) for body in bodies}) == 5


def test_questions_are_chats_whose_answers_are_checked() -> None:
    answers = {
        due.request.messages[0][1]: due.request.right_answer or ""
        for due in planned(replace(LOAD, trace=TraceSpec("questions"), num_requests=20))
    }
    wrong = next(iter(answers))

    async def knowing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        question = body["messages"][0]["content"]
        answer = "no idea" if question == wrong else answers[question]
        return await stream_of(request, body, answer[:3], answer[3:])

    result, bodies, paths = run_against(knowing, trace=TraceSpec("questions"), num_requests=20)
    assert set(paths) == {"/v1/chat/completions"}
    assert "ignore_eos" not in bodies[0]
    assert result.summary.num_checked_answers == 20
    assert result.summary.accuracy == pytest.approx(19 / 20)


def test_long_prompts_are_made_up_whole() -> None:
    body = Bodies(BodyOptions("m")).of(0, TraceRequest(200_000, 1))
    assert len(json.loads(body.content)["prompt"]) == 200_000


def test_further_fields_go_into_every_body() -> None:
    body = Bodies(BodyOptions("m", has_timings=False, extra={"cache": "prefix"})).of(
        0, TraceRequest(5, 7, text="words")
    )
    fields = json.loads(body.content)
    assert fields["cache"] == "prefix"
    assert fields["prompt"] == "words"
    assert fields["stream_options"] == {"include_usage": True}


# -- what is measured ---------------------------------------------------------------------------


def test_records_hold_the_servers_timings(tmp_path: Path) -> None:
    path = tmp_path / "out" / "run.jsonl"
    result, _, _ = run_against(answering, path)
    records = read_records(path)
    assert len(records) == 5
    record = records[0]
    assert (record.num_blocks, record.num_steps, record.num_retries) == (2, 9, 1)
    assert record.placements == [["w-0"], ["w-1", "w-0"]]
    assert record.queueing_seconds == 0.01
    assert record.prefill_queueing_seconds == 0.007
    assert record.decode_queueing_seconds == 0.003
    assert record.commit_counts == [[20, 6, 3, 2, 1], [29, 1, 1, 1]]
    assert record.prompt_tokens == 11
    assert record.first_token_seconds is not None
    assert record.latency_seconds is not None
    assert 0 < record.first_token_seconds <= record.latency_seconds
    assert result.summary.distributions["transfer"].mean == pytest.approx(0.005)
    assert result.summary.num_block_retries == 5


class StallingBodies(Bodies):
    """Holds up the client's own loop once: how late it then is, is what a test measures."""

    has_stalled = False

    def of(self, index: int, request: TraceRequest) -> Body:
        if index == 10 and not self.has_stalled:
            self.has_stalled = True
            time.sleep(STALL_SECONDS)
        return super().of(index, request)


def test_latency_counts_from_when_a_request_was_due_even_if_it_was_sent_late() -> None:
    records: list[RequestRecord] = []
    with serving(answering) as served:
        chosen = options(served.url, num_requests=40, arrivals=Arrivals(rate=400.0))
        plan, bodies = planned(chosen.load), StallingBodies(BodyOptions("stub-model"))

        async def send() -> ClientHealth:
            stop = asyncio.Event()
            return await send_all(plan, chosen.target, bodies, records.append, stop, Progress())

        health = asyncio.run(send())
    late = [r for r in records if r.sent_seconds - r.scheduled_seconds > LATE_SECONDS]
    assert health.num_late == len(late) > 5
    assert health.worst_late_seconds > STALL_SECONDS / 2
    assert all((r.latency_seconds or 0) >= r.sent_seconds - r.scheduled_seconds for r in late)
    assert any("late" in complaint for complaint in health.complaints())


def test_a_slow_server_does_not_hold_back_later_requests() -> None:
    gap_seconds = 0.4

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream_of(request, body, "x", gap_seconds=gap_seconds)

    result, _, _ = run_against(slow, num_requests=30, arrivals=Arrivals(rate=300.0))
    health = result.summary.health
    assert health is not None
    assert health.peak_in_flight == 30
    assert result.summary.distributions["latency"].p50 >= gap_seconds


def test_the_warm_up_is_sent_but_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    result, bodies, _ = run_against(answering, path, warmup_seconds=0.1)
    assert result.summary.num_requests == 5
    assert result.summary.num_warmup == 5
    assert len(bodies) == 10
    assert sum(record.is_warmup for record in read_records(path)) == 5


def test_the_client_complains_only_where_it_was_the_bottleneck() -> None:
    well = ClientHealth(1000, 10, 0.1, 0.01, 0.2, 0.5, 10, 1000)
    assert well.complaints() == []
    assert len(replace(well, num_late=20).complaints()) == 1
    assert len(replace(well, lag_p99_seconds=0.1, cpu_share=0.95).complaints()) == 2


def test_the_client_does_not_complain_of_a_handful() -> None:
    assert ClientHealth(10, 4, 0.1, 0.2, 0.2, 0.5, 10, 20).complaints() == []


def test_events_are_cut_wherever_the_network_cuts_them() -> None:
    stream = b': ping\n\ndata: {"a": "b"}\r\n\r\ndata:[DONE]\n\n'
    for size in range(1, len(stream)):
        reader = EventReader()
        found = [
            data
            for start in range(0, len(stream), size)
            for data in reader.feed(stream[start : start + size])
        ]
        assert found == [b'{"a": "b"}', b"[DONE]"]


# -- what fails -----------------------------------------------------------------------------------


async def _full(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "the line is full"}}, status=429)


async def _error_event(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await event(response, {"error": {"message": "too late", "type": "timeout_error"}})
    return response


async def _cut_off(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await event(response, {"choices": [{"index": 0, "text": "half an ans"}]})
    return response


async def _torn(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await _cut_off(request, body)
    assert request.transport is not None
    request.transport.abort()
    return response


async def _no_stream(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": []})


async def _nonsense(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: {nonsense\n\n")
    return response


async def _silent(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("the client should have gone")


@pytest.mark.parametrize(
    ("handler", "kinds"),
    [
        (_full, {"http_429"}),
        (_error_event, {"event_timeout_error"}),
        (_cut_off, {"broken_stream"}),
        (_torn, {"broken_stream", "connection"}),
        (_no_stream, {"bad_answer"}),
        (_nonsense, {"bad_answer"}),
        (_silent, {"timeout"}),
    ],
)
def test_failures_are_counted_by_kind(handler: Handler, kinds: set[str]) -> None:
    result, _, _ = run_against(handler, timeout_seconds=0.5)
    assert result.summary.num_completed == 0
    assert result.summary.num_failed == sum(result.summary.errors.values()) == 5
    assert set(result.summary.errors) <= kinds
    assert result.summary.error_messages[next(iter(result.summary.errors))]


def test_a_server_that_is_not_there_is_said_before_the_run() -> None:
    with serving(answering) as served:
        url = served.url
    with pytest.raises(TargetError, match="is the server running"):
        run(options(url), QUIET, None)
    result = run(options(url, model="named"), QUIET, None)
    assert result.summary.errors == {"connect": 5}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_requests": None}, "how many requests or for how long"),
        ({"duration_seconds": 3.0}, "not both"),
        ({"num_requests": 0}, "at least one"),
        ({"warmup_seconds": -1.0}, "negative"),
        ({"timeout_seconds": 0.0}, "time-out"),
        ({"arrivals": Arrivals(ArrivalProcess.TRACE), "num_requests": 5}, "time stamp"),
    ],
)
def test_runs_that_make_no_sense_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        planned(options("http://x", **changes).load)


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first_answered = threading.Event()

    async def once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not first_answered.is_set():
            response = await stream_of(request, body, "x")
            first_answered.set()
            return response
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        raise AssertionError("the client should have gone")

    started = time.monotonic()
    result, _, _ = run_against(
        once, path, num_requests=1000, arrivals=Arrivals(ArrivalProcess.CONSTANT, 5.0)
    )
    assert time.monotonic() - started < 30
    assert result.is_interrupted
    assert result.summary.num_completed == 1
    assert result.summary.num_interrupted >= 1
    assert result.summary.num_failed == 0
    assert {record.error for record in read_records(path)} == {None, INTERRUPTED}
