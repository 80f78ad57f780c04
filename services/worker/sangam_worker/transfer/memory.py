"""What NCCL transfers take of a GPU's memory, as numbers: for the budget settled at a start.

Pairs come and go with the fleet, so that a worker provides for some; more of them take from the
share that is left free. No torch; ``lanes`` allocates by these numbers and counts what it has.
"""

SLOT_BYTES = 32 * 2**20
"""A staging slot: one layer of a 2,048 token request of LLaDA-8B, eight of Dream-7B. A message
costs the host some 50 us, so that smaller ones would make it the slowest part."""

NUM_SLOTS = 2
"""Of a pair's end: one is on the wire while the other is filled or emptied."""

COMMUNICATOR_BYTES = 64 * 2**20
"""NCCL's own buffers for a pair's end with a few thread blocks, an estimate from above: up to four
connections of 4 to 10 MiB. ``tests/gpu`` holds it against a GPU."""

PAIRS_PROVIDED_FOR = 8


def provided_bytes() -> int:
    """Memory to leave to transfers beside weights, graphs and pool."""
    return PAIRS_PROVIDED_FOR * (NUM_SLOTS * SLOT_BYTES + COMMUNICATOR_BYTES)
