"""Compares what ran with what must come out, and says the first difference in words.

Tokens, passes and their rows exactly, scores within ``SCORE_TOLERANCE``. Pure.
"""

from collections.abc import Sequence

from sangam_core.counted import counted
from sangam_worker.verify.cases import Case, Forward

SCORE_TOLERANCE = 1e-4
"""float32 in another order of operations moves scores by less (the folder's README)."""


def first_difference(
    case: Case, output_ids: Sequence[int], forwards: Sequence[Forward]
) -> str | None:
    """The first difference, or ``None`` when the case is exact."""
    for number, (got, expected) in enumerate(zip(forwards, case.forwards, strict=False)):
        difference = _pass_difference(got, expected)
        if difference is not None:
            return f"pass {number}: {difference}"
    if len(forwards) != len(case.forwards):
        return f"{counted(len(forwards), 'pass', 'passes')}, expected {len(case.forwards)}"
    if len(forwards) != case.num_passes:
        return f"{counted(len(forwards), 'pass', 'passes')}, expected nfe {case.num_passes}"
    for position, (token, wanted) in enumerate(zip(output_ids, case.output_ids, strict=False)):
        if token != wanted:
            return f"position {position}: token {token}, expected {wanted}"
    if len(output_ids) != len(case.output_ids):
        return f"{counted(len(output_ids), 'output id')}, expected {len(case.output_ids)}"
    return None


def _pass_difference(got: Forward, expected: Forward) -> str | None:
    rows, wanted_rows = ((item.block, item.start, item.num_rows) for item in (got, expected))
    if rows != wanted_rows:
        return f"block, start, rows {rows}, expected {wanted_rows}"
    written, wanted = (
        {item.position: item.token for item in forward.writes} for forward in (got, expected)
    )
    if written != wanted:
        position = min(
            place
            for place in written.keys() | wanted.keys()
            if written.get(place) != wanted.get(place)
        )
        return (
            f"position {position}: wrote {written.get(position, 'nothing')}, "
            f"expected {wanted.get(position, 'nothing')}"
        )
    scores = {item.position: item.score for item in got.writes}
    for item in expected.writes:
        score = scores[item.position]
        # A position filled behind an end token has no score here; the reference notes one where
        # the position's own prediction happens to be the end token too.
        if item.score is None or score is None:
            continue
        if not abs(score - item.score) <= SCORE_TOLERANCE:
            return f"position {item.position}: score {score}, expected {item.score}"
    return None
