"""``sangam chat``: a dialogue in the terminal, each answer shown while it is being unmasked.

Decides what is sent and how the stream is read; how it looks is ``unmasking_view``'s. On a
terminal the answer fills in place, otherwise its text comes out as it settles.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sangam_core.counted import counted
from sangam_core.errors import SangamError
from sangam_router.local.unmasking_view import UnmaskingView

_CONNECT_SECONDS = 5.0
_SILENCE_SECONDS = 120.0
_KEY_HINT = " (give the router's key with --api-key or SANGAM_API_KEY)"

Message = dict[str, str]
Chunks = AsyncGenerator[dict[str, Any], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Whom to ask, and how.

    Attributes:
        model: ``None``: the first that the router serves.
        num_earlier_turns: question-and-answer pairs sent along with each question.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    max_tokens: int = 128
    num_earlier_turns: int = 1


class ChatError(SangamError):
    """The router cannot be reached, or did not answer the question."""


class ChatClient:
    """Asks one router. Each question opens its own connection: people type slowly."""

    def __init__(self, options: ChatOptions) -> None:
        self._options = options
        self._headers = (
            {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
        )

    async def served_model(self) -> str:
        """The model asked for, or the first that is served."""
        if self._options.model is not None:
            return self._options.model
        async with self._session() as session, session.get("/v1/models") as response:
            await _raise_unless_ok(response)
            try:
                return str(json.loads(await response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ChatError(f"{self._options.url} does not speak the OpenAI API") from error

    async def ask(self, model: str, messages: list[Message]) -> Chunks:
        """The chunks of the answer, in order.

        Raises:
            ChatError: a refusal, an error in the stream, or a connection that breaks.
        """
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": self._options.max_tokens,
            "stream": True,
            "stream_options": {
                "include_usage": True,
                "continuous_usage_stats": True,
                "include_denoising": True,
                "include_timings": True,
            },
        }
        async with (
            self._session() as session,
            session.post("/v1/chat/completions", json=body) as response,
        ):
            await _raise_unless_ok(response)
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                chunk: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise ChatError(str(chunk["error"].get("message", chunk["error"])))
                yield chunk

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS
        )
        return aiohttp.ClientSession(
            self._options.url, headers=self._headers, timeout=timeout, read_bufsize=2**20
        )


def chat(options: ChatOptions, console: Console) -> None:
    """Talk until the input ends or is ``/exit``. Ctrl-C stops an answer, at the prompt the chat.

    Raises:
        ChatError: the router cannot be reached (later errors are shown, and the chat goes on,
            unless the input is not a terminal).
    """
    client = ChatClient(options)
    is_terminal = console.is_terminal and sys.stdin.isatty()
    turns: list[tuple[str, str]] = []
    with asyncio.Runner() as runner:
        model = runner.run(_reaching(options.url, client.served_model()))
        if is_terminal:
            console.print(f"{model} at {options.url}.")
            console.print("Leave with Ctrl-D or /exit; /new forgets what was said.")
        while (question := _read_question(console, is_terminal)) not in (None, "/exit"):
            if question == "/new":
                turns.clear()
            elif question:
                earlier = turns[max(0, len(turns) - options.num_earlier_turns) :]
                show = _show_live if is_terminal else _show_plain
                chunks = client.ask(model, _messages(earlier, question))
                try:
                    view = runner.run(_reaching(options.url, show(chunks, console)))
                except KeyboardInterrupt:
                    console.print("(stopped)", style="dim")
                except ChatError as error:
                    if not is_terminal:
                        raise
                    console.print(Text(f"error: {error}", style="red"))
                else:
                    turns.append((question, view.settled))


def _messages(earlier: list[tuple[str, str]], question: str) -> list[Message]:
    messages: list[Message] = []
    for asked, answered in earlier:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    return [*messages, {"role": "user", "content": question}]


def _read_question(console: Console, is_terminal: bool) -> str | None:
    """The next question, or ``None`` at the end of the input."""
    try:
        return (console.input("[bold]>[/bold] ") if is_terminal else input()).strip()
    except EOFError:
        return None


async def _show_live(chunks: Chunks, console: Console) -> UnmaskingView:
    view = UnmaskingView()
    with Live(Text(), console=console, auto_refresh=False) as live:
        async with aclosing(chunks):
            async for chunk in chunks:
                view.take(chunk)
                live.update(view.render(), refresh=True)
    console.print(Text(timings_line(view), style="dim"))
    return view


async def _show_plain(chunks: Chunks, console: Console) -> UnmaskingView:
    """Text alone on stdout, timings on stderr: for pipes."""
    view = UnmaskingView()
    async with aclosing(chunks):
        async for chunk in chunks:
            console.file.write(view.take(chunk))
            console.file.flush()
    console.file.write("\n")
    Console(stderr=True, highlight=False).print(Text(timings_line(view)), soft_wrap=True)
    return view


def timings_line(view: UnmaskingView) -> str:
    """One line on how the answer came about, from what the router tells of it."""
    parts = [counted(view.num_tokens, "token")]
    timings = view.timings
    if timings:
        passes = timings.get("num_steps")
        if passes:
            parts[0] += f" in {counted(passes, 'pass', 'passes')}"
            parts[0] += f" ({view.num_tokens / passes:.1f} a pass)" if passes > 1 else ""
        named = (
            ("latency_seconds", "in all"),
            ("queueing_seconds", "queueing"),
            ("prefill_seconds", "prefill"),
            ("transfer_seconds", "KV transfer"),
            ("decode_seconds", "decode"),
        )
        parts += [f"{1000 * timings[key]:.0f} ms {name}" for key, name in named if timings.get(key)]
    return ", ".join(parts)


async def _reaching(url: str, work: Awaitable[T]) -> T:
    """Await, with a connection's errors in words."""
    try:
        return await work
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ChatError(f"no answer from {url} ({error}); is `sangam up` running?") from error


async def _raise_unless_ok(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text()
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    hint = _KEY_HINT if response.status == 401 else ""
    raise ChatError(f"{response.status}: {message}{hint}")
