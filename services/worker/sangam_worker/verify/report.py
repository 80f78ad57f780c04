"""Says a tally in words. Called by ``__main__``."""

from collections.abc import Iterator

from sangam_core.counted import counted
from sangam_worker.verify.forcing import Tally

MAX_DISAGREEMENTS = 20
"""Said one by one; a broken engine has thousands."""


def tally_lines(name: str, tally: Tally) -> Iterator[str]:
    """A model's result, line by line."""
    yield from tally.disagreements[:MAX_DISAGREEMENTS]
    num_more = len(tally.disagreements) - MAX_DISAGREEMENTS
    if num_more > 0:
        yield f"... and {num_more} more"
    replayed = f", {tally.num_replayed} of them from graphs" if tally.num_replayed else ""
    cases, passes = counted(tally.num_cases, "case"), counted(tally.num_passes, "pass", "passes")
    yield f"{name}: {cases}, {passes}{replayed}"
    yield "  tokens       " + _share(
        tally.num_equal_tokens, tally.num_tokens, tally.num_excused_tokens
    )
    yield "  commit sets  " + _share(tally.num_equal_sets, tally.num_sets, tally.num_excused_sets)
    yield f"  confidences  differ by {tally.max_confidence_difference:.3g} at most"
    yield f"  logits       off by {100 * tally.logit_error:.3g} % of their spread" + _ratios(tally)


def _share(num_equal: int, number: int, num_excused: int) -> str:
    share = 100 * num_equal / number if number else 100.0
    excused = f", {num_excused} excused" if num_equal < number else ""
    return f"{num_equal} of {number} equal ({share:.2f} %){excused}"


def _ratios(tally: Tally) -> str:
    if not tally.error_ratio:
        return ""
    return (
        f", {tally.error_ratio:.2f} times what is to be expected "
        f"({tally.max_error_ratio:.1f} at most in a row); excused gaps reach "
        f"{100 * tally.widest_excused:.0f} % of the limit"
    )
