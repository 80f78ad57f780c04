"""Which lengths a trace's requests may have, and what to change where none has them.

Called by ``source``; the options that are named are those of ``sangam loadtest``.
"""

from collections import Counter
from dataclasses import dataclass, fields

from sangam_core.errors import ConfigurationError
from sangam_loadtest.traces.request import TraceRequest


@dataclass(frozen=True, slots=True)
class LengthFilter:
    """Lengths, in tokens, that a trace's requests may have; total is prompt + output."""

    min_prompt: int = 1
    max_prompt: int | None = None
    min_output: int = 1
    max_output: int | None = None
    max_total: int | None = None

    def __post_init__(self) -> None:
        for part in ("prompt", "output"):
            low, high = getattr(self, f"min_{part}"), getattr(self, f"max_{part}")
            if high is not None and high < low:
                raise ConfigurationError(f"max_{part} ({high}) is below min_{part} ({low})")

    def lets_through(self, request: TraceRequest) -> bool:
        """Whether the request stays in the trace."""
        prompt, output = request.prompt_tokens, request.output_tokens
        return (
            self.min_prompt <= prompt <= (self.max_prompt or prompt)
            and self.min_output <= output <= (self.max_output or output)
            and prompt + output <= (self.max_total or prompt + output)
        )

    def misses(self, request: TraceRequest) -> dict[str, int]:
        """The bounds (fields) that a request breaks, with its length in the place of each."""
        lengths = {
            "prompt": request.prompt_tokens,
            "output": request.output_tokens,
            "total": request.prompt_tokens + request.output_tokens,
        }
        found: dict[str, int] = {}
        for name in self._names():
            bound, length = getattr(self, name), lengths[name[4:]]
            if bound is not None and (length > bound if _is_upper(name) else length < bound):
                found[name] = length
        return found

    def __str__(self) -> str:
        """The bounds that were set, as options."""
        defaults = LengthFilter()
        names = [name for name in self._names() if getattr(self, name) != getattr(defaults, name)]
        return ", ".join(f"{_option(name)} {getattr(self, name)}" for name in names)

    @classmethod
    def _names(cls) -> list[str]:
        return [item.name for item in fields(cls)]


class Rejections:
    """Requests that a filter turned away, as long as it lets none through."""

    def __init__(self, lengths: LengthFilter) -> None:
        self.num_requests = 0
        self._lengths = lengths
        self._counts: Counter[str] = Counter()
        self._nearest: dict[str, int] = {}

    def add(self, request: TraceRequest) -> None:
        """One more."""
        self.num_requests += 1
        for name, length in self._lengths.misses(request).items():
            self._counts[name] += 1
            nearest = self._nearest.setdefault(name, length)
            self._nearest[name] = min(nearest, length) if _is_upper(name) else max(nearest, length)

    def advice(self) -> str:
        """Which options turned all of them away, and how far each would have to go."""
        to_blame = [name for name, count in self._counts.items() if count == self.num_requests]
        if not to_blame:
            return f"no request meets all of {self._lengths}: widen them"
        return "; ".join(
            f"{'raise' if _is_upper(name) else 'lower'} {_option(name)} "
            f"{getattr(self._lengths, name)} to {self._nearest[name]} "
            f"or {'more' if _is_upper(name) else 'less'}"
            for name in to_blame
        )


def _is_upper(name: str) -> bool:
    return name.startswith("max_")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
