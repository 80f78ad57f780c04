"""Golden cases under teacher forcing: an engine is compared pass by pass, on golden states.

Run freely, an engine in bfloat16 leaves the golden tokens at the first near tie and cannot be
compared from there on. Here every pass starts from what the golden passes before it wrote: plans go
to the float32 engine on a CPU, whose outcome is applied, and to the engine under test, which is
only listened to: the tokens and confidences that it proposes, the set that it would commit, its
logits. ``decisions`` says which differences its number format explains. Called by ``__main__``,
tests and benchmarks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from sangam_core.decoding import Commit
from sangam_worker.engine import Engine
from sangam_worker.kv_pool import KVPool
from sangam_worker.models.description import ModelConfig
from sangam_worker.plan import Outcome, Pass, PassOutcome, Plan
from sangam_worker.sampling.rules import committable
from sangam_worker.verify.cases import Case
from sangam_worker.verify.compare import first_difference
from sangam_worker.verify.decisions import Limits, is_choice_explained, limits_of
from sangam_worker.verify.drive import run_cases
from sangam_worker.verify.reference import ROW_LIMIT, Reference, row_errors

OVERALL_LIMIT = 1.5
"""What ``ROW_LIMIT`` is for a row, for all of them together, where chance evens out."""


@dataclass(slots=True)
class Tally:
    """What was compared, and what came of it.

    Attributes:
        num_replayed: passes that came from a graph.
        num_tokens: golden commits; equal: the engine proposes the same token there.
        num_sets: passes that can commit; equal: the engine would commit the same positions.
        num_excused_tokens, num_excused_sets: different, and explained by the number format.
        max_confidence_difference: over every candidate of every pass.
        logit_error: root mean square by which logits are off, relative to their spread in a row.
        error_ratio: the same relative to the perturbed engines' (0 where nothing may differ), over
            all rows, and max_error_ratio in a row.
        widest_excused: the largest gap of two golden logits that was excused, relative to the
            largest that would have been.
        disagreements: a line for each difference that nothing excuses.
    """

    num_cases: int = 0
    num_passes: int = 0
    num_replayed: int = 0
    num_tokens: int = 0
    num_equal_tokens: int = 0
    num_excused_tokens: int = 0
    num_sets: int = 0
    num_equal_sets: int = 0
    num_excused_sets: int = 0
    max_confidence_difference: float = 0.0
    logit_error: float = 0.0
    error_ratio: float = 0.0
    max_error_ratio: float = 0.0
    widest_excused: float = 0.0
    disagreements: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Compared:
    """One pass of both engines.

    Attributes:
        positions: candidates. rows: their logits by the reference; errors: by how much the
            engine's differ, root mean square by row; deviations: what is expected of that.
        proposed, wanted: each candidate's token and confidence.
        chosen, golden: the positions that commit.
    """

    item: Pass
    positions: tuple[int, ...]
    rows: Tensor
    errors: Tensor
    deviations: Tensor
    proposed: dict[int, Commit]
    wanted: dict[int, Commit]
    chosen: frozenset[int]
    golden: frozenset[int]

    @property
    def scales(self) -> Tensor:
        """By how much a single logit of a row is off: its own error where that is explained (which
        ``ROW_LIMIT`` decides) and is larger than expected; zeros where nothing may be off."""
        if not self.deviations.any():
            return self.deviations
        return self.errors.maximum(self.deviations)


class ForcedEngine:
    """Carries out plans as ``reference`` does, and compares ``engine`` with it in passing.

    Args:
        engine: under test, with a pool of as many pages as the reference's.
    """

    def __init__(self, reference: Reference, engine: Engine) -> None:
        self._reference, self._engine = reference, engine
        self.tally = Tally()
        self._squares = [0.0, 0.0]
        self._num_rows = 0

    @property
    def model_config(self) -> ModelConfig:
        """The reference's."""
        return self._reference.engine.model_config

    @property
    def kv_pool(self) -> KVPool:
        """The reference's."""
        return self._reference.engine.kv_pool

    def execute(self, plan: Plan) -> Outcome:
        """Run an iteration on every engine; the reference's outcome."""
        reference = self._reference.engine
        rows, deviations = self._reference.expected(plan)
        replayed = self._engine.replay(plan)
        logits = self._engine.forward(plan) if replayed is None else replayed
        errors = row_errors(self._reference.candidates(logits, plan), rows)
        # The outcomes last: what an engine's own passes leave on its pages is what stays there.
        wanted = reference.execute(_committing_everything(plan))
        golden = reference.execute(plan)
        proposed = self._engine.execute(_committing_everything(plan))
        chosen = self._engine.execute(plan)
        start = 0
        for number, item in enumerate(plan.passes):
            positions = committable(item, self.model_config.family)
            cut = slice(start, start + len(positions))
            start += len(positions)
            self.tally.num_passes += 1
            self.tally.num_replayed += replayed is not None
            own = [each.passes[number] for each in (proposed, chosen)]
            if any(outcome.error for outcome in own):
                self._say(item, f"no outcome: {own[0].error or own[1].error}")
            elif positions:
                self._check_repeats(item, *own)
                self._compare(
                    _Compared(
                        item=item,
                        positions=positions,
                        rows=rows[cut],
                        errors=errors[cut],
                        deviations=deviations[cut],
                        proposed=_by_position(own[0]),
                        wanted=_by_position(wanted.passes[number]),
                        chosen=frozenset(_by_position(own[1])),
                        golden=frozenset(_by_position(golden.passes[number])),
                    )
                )
        return golden

    def _compare(self, compared: _Compared) -> None:
        limits = limits_of(
            compared.item,
            self.model_config.family,
            compared.rows,
            compared.scales,
            self.model_config.mask_id,
            self._engine.kv_pool.dtype,
        )
        self._compare_logits(compared)
        self._compare_tokens(compared, limits)
        self._compare_confidences(compared, limits)
        self._compare_sets(compared, limits)

    def _compare_logits(self, compared: _Compared) -> None:
        tally = self.tally
        spreads = compared.rows.std(-1, correction=0)
        self._squares[0] += float((compared.errors / spreads).square().sum())
        self._num_rows += len(spreads)
        tally.logit_error = math.sqrt(self._squares[0] / self._num_rows)
        if compared.deviations.any():
            ratios = compared.errors / compared.deviations
            self._squares[1] += float(ratios.square().sum())
            tally.error_ratio = math.sqrt(self._squares[1] / self._num_rows)
            tally.max_error_ratio = max(tally.max_error_ratio, float(ratios.max()))
        beyond = ~(compared.errors <= ROW_LIMIT * compared.deviations)
        for index in beyond.nonzero()[:, 0].tolist():
            error, deviation = float(compared.errors[index]), float(compared.deviations[index])
            self._say(
                compared.item,
                f"position {compared.positions[index]}: logits off by {error:.3g} (root mean "
                f"square), where {deviation:.3g} is to be expected",
            )

    def _compare_tokens(self, compared: _Compared, limits: Limits) -> None:
        tally = self.tally
        for index, position in enumerate(compared.positions):
            if position not in compared.golden:
                continue
            tally.num_tokens += 1
            got, golden = compared.proposed[position].token, compared.wanted[position].token
            if got == golden:
                tally.num_equal_tokens += 1
                continue
            gap = float(compared.rows[index, golden] - compared.rows[index, got])
            if gap <= limits.gaps[index]:
                tally.num_excused_tokens += 1
                share = gap / limits.gaps[index] if gap else 0.0
                tally.widest_excused = max(tally.widest_excused, share)
                continue
            self._say(
                compared.item,
                f"position {position}: token {got} for {golden}, whose logit is larger by {gap:.3g}"
                f"; up to {limits.gaps[index]:.3g} would be excused",
            )

    def _compare_confidences(self, compared: _Compared, limits: Limits) -> None:
        for position, limit in zip(compared.positions, limits.confidences, strict=True):
            got, wanted = (
                each[position].confidence for each in (compared.proposed, compared.wanted)
            )
            assert got is not None
            assert wanted is not None
            difference = abs(got - wanted)
            self.tally.max_confidence_difference = max(
                self.tally.max_confidence_difference, difference
            )
            if not difference <= limit:
                self._say(
                    compared.item,
                    f"position {position}: confidence {got:.6g} for {wanted:.6g}; up to "
                    f"{limit:.3g} would be excused",
                )

    def _compare_sets(self, compared: _Compared, limits: Limits) -> None:
        tally = self.tally
        tally.num_sets += 1
        different = compared.chosen ^ compared.golden
        if not different:
            tally.num_equal_sets += 1
            return
        confidences = [_confidence(compared.wanted[each]) for each in compared.positions]
        family = self.model_config.family
        for position in sorted(different):
            index = compared.positions.index(position)
            if not is_choice_explained(compared.item, family, confidences, limits, index):
                verb = "commits" if position in compared.chosen else "does not commit"
                self._say(
                    compared.item,
                    f"{verb} position {position}; golden confidence {confidences[index]:.6g}, up "
                    f"to {limits.confidences[index]:.3g} off would be excused",
                )
                return
        tally.num_excused_sets += 1

    def _check_repeats(self, item: Pass, everything: PassOutcome, chosen: PassOutcome) -> None:
        """The same rows twice give the same numbers, or the second figures explain nothing."""
        first, again = _by_position(everything), _by_position(chosen)
        if any(first.get(position) != commit for position, commit in again.items()):
            self._say(item, "run again, the same pass gives other tokens or confidences")

    def _say(self, item: Pass, text: str) -> None:
        name = f"{item.key.request_id}: block {item.block_index}, step {item.step}"
        self.tally.disagreements.append(f"{name}: {text}")


def force_cases(
    cases: Sequence[Case], forced: ForcedEngine, *, in_flight: int = 8
) -> Iterator[Case]:
    """Run cases of one model, ``in_flight`` at once; each as it is finished.

    ``forced.tally`` has the result at the end.
    """
    for ran in run_cases(cases, forced, in_flight=in_flight):
        forced.tally.num_cases += 1
        difference = first_difference(ran.case, ran.output_ids, ran.forwards)
        if difference is not None:
            forced.tally.disagreements.append(
                f"{ran.case.id}: the float32 reference itself is not golden: {difference}"
            )
        yield ran.case
    if forced.tally.error_ratio > OVERALL_LIMIT:
        forced.tally.disagreements.append(
            f"all passes: logits are off by {forced.tally.error_ratio:.3g} times what is to be "
            f"expected, which is more than {OVERALL_LIMIT:g}"
        )


def _committing_everything(plan: Plan) -> Plan:
    """The same passes under rules that commit every candidate, so that all can be seen."""
    return replace(plan, passes=tuple(_unrestrained(item) for item in plan.passes))


def _unrestrained(item: Pass) -> Pass:
    most = {"threshold": 0.0, "steps": 1, "factor": 1e6}
    unmasking = item.decoding.unmasking.model_copy(update=most)
    return item._replace(decoding=item.decoding.model_copy(update={"unmasking": unmasking}))


def _by_position(outcome: PassOutcome) -> dict[int, Commit]:
    return {commit.position: commit for commit in outcome.commits}


def _confidence(commit: Commit) -> float:
    assert commit.confidence is not None
    return commit.confidence
