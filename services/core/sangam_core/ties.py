"""How ties between equally good workers break: by a hash of ids.

So that replicas of the router, which see the same loads at the same moment, do not herd onto
one worker, and the same question always gets the same answer.
"""

from hashlib import blake2b


def tie_break(*ids: str) -> int:
    """A 64-bit number that depends on the ids and nothing else (no PYTHONHASHSEED)."""
    digest = blake2b("\x00".join(ids).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
