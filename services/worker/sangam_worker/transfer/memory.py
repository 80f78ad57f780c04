"""What NCCL transfers take of a GPU's memory, as numbers: for the budget settled at a start.

Staging goes by the transfers under way, NCCL's own buffers by the open pairs; both are bounded, and
provided for in one direction. No torch; ``lanes`` and ``open_pairs`` keep to these numbers.
"""

SLOT_BYTES = 32 * 2**20
"""A staging slot: one layer of a 2,048 token request of LLaDA-8B, eight of Dream-7B. A message
costs the host some 50 us, so that smaller ones would make it the slowest part."""

NUM_SLOTS = 2
"""Of a transfer: one is on the wire while the other is filled or emptied."""

TRANSFERS_EACH_WAY = 8
"""So many may be sent at once, and as many received; others wait for their turn. Each has two side
streams, and torch has 32 a device: were they shared, a receive that waits for its peer would stand
before another's copies. A few are as fast as a link or network card can be."""

COMMUNICATOR_BYTES = 64 * 2**20
"""NCCL's own buffers for a pair's end with a few thread blocks, an estimate from above: up to four
connections of 4 to 10 MiB. ``tests/gpu`` holds it against a GPU."""


def provided_bytes(pairs_each_way: int) -> int:
    """Memory to leave to transfers beside weights, graphs and pool.

    Of one direction: workers that only prefill or only decode never have more. One that both sends
    and receives its fill takes as much again from the share that is left free.

    Args:
        pairs_each_way: may be open to send on, and as many to receive on. No fewer than transfers,
            so that one that is not in use can always be closed for one that is needed.
    """
    staging_bytes = TRANSFERS_EACH_WAY * NUM_SLOTS * SLOT_BYTES
    return staging_bytes + pairs_each_way * COMMUNICATOR_BYTES
