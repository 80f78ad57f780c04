"""Commits that random weights cannot give: how many is drawn, the device works as for real ones.

Decides the counts (whole blocks from a distribution, recorded or geometric) and lays them over
what the engine's own sampling and rules found, on the host, when their cost is paid. Which
positions and tokens those are does not matter to time. Wraps the engine for the loop.
"""

import random

from sangam_core.decoding import Commit
from sangam_core.wire import BlockKey
from sangam_loadtest.simulator.commits import CommitCounts
from sangam_worker.engine import Engine
from sangam_worker.plan import Launched, Outcome, Pass, PassOutcome, Plan


class ForcedCommits:
    """An engine whose passes commit as many tokens as drawn.

    Args:
        token: what every commit is; neither the mask nor an end token.
    """

    def __init__(self, engine: Engine, counts: CommitCounts, token: int, seed: int = 0) -> None:
        self._engine, self._counts, self._token = engine, counts, token
        self._random = random.Random(seed)
        self._left: dict[BlockKey, list[int]] = {}

    def launch(self, plan: Plan) -> Launched:
        """Launch it on the engine."""
        return _ForcedLaunch(self, self._engine.launch(plan), plan)

    def forced(self, plan: Plan, outcome: Outcome) -> Outcome:
        """The outcome with the drawn commits in place of the engine's."""
        passes = zip(plan.passes, outcome.passes, strict=True)
        return Outcome(outcome.iteration, tuple(self._of_pass(*each) for each in passes))

    def _of_pass(self, item: Pass, seen: PassOutcome) -> PassOutcome:
        if seen.error is not None:
            self._left.pop(item.key, None)
            return seen
        left = self._left.get(item.key)
        if left is None:
            drawn = self._counts.draw(self._random, len(item.masked), item.block_index)
            left = self._left[item.key] = list(reversed(drawn))
        positions = item.masked[: left.pop()]
        if len(positions) == len(item.masked):
            self._left.pop(item.key)
        commits = tuple(Commit.model_construct(position=p, token=self._token) for p in positions)
        return PassOutcome(item.key, commits, carry=seen.carry)


class _ForcedLaunch:
    def __init__(self, forced: ForcedCommits, launched: Launched, plan: Plan) -> None:
        self._forced, self._launched, self._plan = forced, launched, plan

    @property
    def device_seconds(self) -> float | None:
        return self._launched.device_seconds

    def outcome(self) -> Outcome:
        return self._forced.forced(self._plan, self._launched.outcome())
