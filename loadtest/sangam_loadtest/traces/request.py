"""One request of a trace, and the error that a malformed trace file gets: plain data.

Every reader of ``traces`` yields these; the client turns them into HTTP bodies, the simulator
reads only lengths and arrival times.
"""

from dataclasses import dataclass
from pathlib import Path

from sangam_core.errors import SangamError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        prompt_tokens: length of the prompt; 0 where only the server can tell (questions).
        output_tokens: tokens of the answer; the most there may be unless ``is_exact_output``.
        arrival_seconds: since the trace's first request, in traces that have time stamps.
        messages: (role, content) of a dialogue, for the chat endpoint.
        text: a prompt as text, for the completions endpoint.
        task: the shipped model's task that the question belongs to.
        right_answer: what a right answer says, where that is known.
        is_exact_output: the answer has exactly ``output_tokens`` tokens (``ignore_eos``).

    Without ``messages`` and ``text`` the prompt is ``prompt_tokens`` made-up token ids.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_seconds: float | None = None
    messages: tuple[tuple[str, str], ...] = ()
    text: str | None = None
    task: str | None = None
    right_answer: str | None = None
    is_exact_output: bool = True


class TraceError(SangamError):
    """A trace cannot be had: the file is missing or malformed, or nothing is left of it."""


def malformed(path: Path, line: int, column: str, problem: str) -> TraceError:
    """The error for one bad value, naming file, line and column (or key)."""
    return TraceError(f"{path}, line {line}, {column}: {problem}")
