"""Variables that look like settings and are none: which they are, and what was probably meant.

Whoever mistypes a variable would otherwise get the default without a word. Routers, workers and
load tests often share one environment, so that a name is known if any of them reads it: the names
of all services' settings stand in ``settings_names.txt``, which ``make settings-table`` writes and
a test holds to the settings classes. Called where a service starts and by ``sangam up``, which
tell. It is never an error: a fleet that is rolled back to an older version must start although
its environment is newer.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources

from sangam_core.settings import ENV_PREFIX, SERVICE_ADDRESS

NAMES_FILE = "settings_names.txt"

READ_ELSEWHERE = frozenset(
    {
        "SANGAM_API_KEY",  # the key that `sangam chat` and `sangam loadtest` send
        "SANGAM_CLUSTER_HOME",  # tests of the chart and on clusters
        "SANGAM_CLUSTER_NAME",
        "SANGAM_REDIS_SERVER",  # the Redis that `sangam up` starts
        "SANGAM_SHARED",  # tests: golden cases, traces, a cluster
    }
)
"""Variables that are documented and no service's settings."""

_TESTS_PREFIX = "SANGAM_TEST_"

_SERVICE_LINK = re.compile(
    r"(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$"
)
"""What Kubernetes puts into every pod for each Service: ``NAME_SERVICE_HOST``, ``NAME_PORT`` with
an address, and so on. A release called ``sangam`` has such Services."""

_LIKENESS = 0.8
_MOST_GUESSES = 4


@dataclass(frozen=True, slots=True)
class UnknownSetting:
    """A variable that nothing reads.

    Attributes:
        meant: names of settings that it resembles, the likeliest first; may be empty.
    """

    name: str
    meant: tuple[str, ...]

    @property
    def problem(self) -> str:
        """What is wrong, for people; never the value, which may be a secret."""
        told = "there is no such setting, so it is ignored"
        if not self.meant:
            return told
        *rest, last = self.meant
        return f"{told}; did you mean {', '.join(rest)}{' or ' if rest else ''}{last}?"


def unknown_settings(
    environment: Mapping[str, str], known: Iterable[str] | None = None
) -> list[UnknownSetting]:
    """The ``SANGAM_`` variables that no part of Sangam reads, by name.

    Args:
        known: every setting there is; by default those of the services.
    """
    settings = sorted(settings_names() if known is None else known)
    names = {name.upper(): value for name, value in environment.items()}
    return [
        UnknownSetting(name, _meant(name, settings))
        for name, value in sorted(names.items())
        if name.startswith(ENV_PREFIX)
        and name not in settings
        and name not in READ_ELSEWHERE
        and not name.startswith(_TESTS_PREFIX)
        and not _is_of_kubernetes(name, value)
    ]


def settings_names() -> frozenset[str]:
    """The variables of all services' settings."""
    text = resources.files(__package__).joinpath(NAMES_FILE).read_text(encoding="ascii")
    return frozenset(text.split())


def _is_of_kubernetes(name: str, value: str) -> bool:
    if _SERVICE_LINK.search(name):
        return True
    return name.endswith("_PORT") and SERVICE_ADDRESS.match(value) is not None


def _meant(name: str, settings: list[str]) -> tuple[str, ...]:
    """Settings that have all of a name's words, else one of nearly its letters, else such words."""
    given = name.removeprefix(ENV_PREFIX)
    short = {each.removeprefix(ENV_PREFIX): each for each in settings}
    words = [part for part in given.split("_") if part]
    exactly = [each for each in short if set(words) <= set(each.split("_"))]
    close = get_close_matches(given, short, n=1, cutoff=_LIKENESS)
    nearly = [each for each in short if _has_beginnings(each.split("_"), words)]
    guesses = next(
        (some for some in (exactly, close, nearly) if 0 < len(some) <= _MOST_GUESSES), []
    )
    return tuple(short[each] for each in guesses)


def _has_beginnings(words: list[str], parts: list[str]) -> bool:
    """Whether each part begins a word: TAU and TOKEN do in TAU_TOKENS_DECODE."""
    return all(any(word.startswith(part) for word in words) for part in parts)
