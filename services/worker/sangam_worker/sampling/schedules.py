"""How many tokens the stepped rules commit per pass.

Decides counts; ``rules`` decides which tokens. Every schedule ends: from its last pass on all
masks that are left commit.
"""

from functools import lru_cache

import torch


def even_count(initial_masks: int, steps: int, step: int) -> int:
    """Fast-dLLM's ``fixed``: floor(n / S), and one more in the first n mod S passes."""
    return initial_masks // steps + (step < initial_masks % steps)


@lru_cache(maxsize=256)
def commit_probabilities(steps: int, eps: float) -> tuple[float, ...]:
    """1 - s/t for each pass of Dream's time schedule, in float32 (other widths change counts)."""
    times = torch.linspace(1.0, eps, steps + 1, dtype=torch.float32)
    values: list[float] = (1.0 - times[1:] / times[:-1]).tolist()
    return tuple(values)


def timed_count(num_masks: int, steps: int, step: int, eps: float) -> int:
    """Dream's schedule: int(n_mask * (1 - s/t)), truncated; the last pass takes all that is left.

    It may be 0 in early passes.
    """
    if step >= steps - 1:
        return num_masks
    share = torch.tensor(commit_probabilities(steps, eps)[step], dtype=torch.float32)
    return int(torch.tensor(num_masks, dtype=torch.float32) * share)
