"""What ``rebalance`` is asked for: how many workers of each role; refuses what could never serve.

Pure. Whether a split fits the fleet at hand is ``plan``'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from sangam_core.errors import SangamError
from sangam_core.placement import Role

ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


class SplitImpossible(SangamError):
    """Workers cannot be divided in this way; the text says why and what to ask for instead."""


@dataclass(frozen=True, slots=True)
class Split:
    """Workers by role."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    def of(self, role: Role) -> int:
        """How many workers of a role."""
        return {
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
            Role.COLOCATED: self.colocated,
        }[role]

    @property
    def total(self) -> int:
        """How many workers in all."""
        return self.prefill + self.decode + self.colocated

    def __str__(self) -> str:
        return " ".join(f"{role.value}={self.of(role)}" for role in ROLES if self.of(role))


def split_of(roles: Sequence[Role]) -> Split:
    """The split that some workers make."""
    return Split(**{role.value: roles.count(role) for role in ROLES})


def parse_split(words: Sequence[str]) -> Split:
    """Read ``prefill=4 colocated=4``; a role that is not named gets none.

    Raises:
        SplitImpossible: a word cannot be read, or nobody would prefill or decode.
    """
    counts: dict[Role, int] = {}
    for word in words:
        role, count = _read(word)
        if role in counts:
            raise SplitImpossible(f"{role.value} is given twice")
        counts[role] = count
    split = Split(**{role.value: count for role, count in counts.items()})
    if not split.colocated and not split.decode:
        raise SplitImpossible(
            "nobody would decode, so no answer would ever end: "
            "ask for colocated=1 or decode=1 at least"
        )
    if not split.colocated and not split.prefill:
        raise SplitImpossible(
            "nobody would prefill, so no answer could begin: "
            "ask for colocated=1 or prefill=1 at least"
        )
    return split


def _read(word: str) -> tuple[Role, int]:
    name, equals, number = word.partition("=")
    known = [role.value for role in ROLES]
    if not equals:
        raise SplitImpossible(f"{word!r}: write ROLE=COUNT, as in prefill=4 colocated=4")
    if name not in known:
        close = get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
        raise SplitImpossible(f"unknown role {name!r}{hint}")
    if not (number.isascii() and number.isdecimal()):
        raise SplitImpossible(f"{word!r}: the count must be a whole number, 0 or more")
    return Role(name), int(number)
