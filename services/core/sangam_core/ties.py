"""How ties between equally good workers break: by a hash of ids.

So that replicas of the router, which see the same loads at the same moment, do not herd onto
one worker, and the same question always gets the same answer.
"""

from collections.abc import Callable
from hashlib import blake2b

_NUM_BYTES = 8


def tie_breaker(request_id: str) -> Callable[[str], bytes]:
    """What orders other ids for a request: bytes that depend on the two ids and nothing else.

    Hashes what they share once; a large idle fleet ties as a whole.
    """
    shared = blake2b(f"{request_id}\x00".encode(), digest_size=_NUM_BYTES)

    def break_tie(other: str) -> bytes:
        own = shared.copy()
        own.update(other.encode())
        return own.digest()

    return break_tie
