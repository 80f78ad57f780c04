"""What a recommendation says in a terminal.

Decides words and their order: what to run, how far the objectives are held, what the choice is
worth against the others, how to deploy it, and what to doubt. Called by the command.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sangam_core.counted import counted
from sangam_loadtest.capacity import Objective
from sangam_loadtest.recommend.candidates import Candidate
from sangam_loadtest.recommend.deploy import helm_command, local_command
from sangam_loadtest.recommend.more_gpus import by_proportion
from sangam_loadtest.recommend.search import Finalist, best_of_modes
from sangam_loadtest.recommend.trials import MIN_JUDGED, Trial

_TWICE = 1.0


def show_recommendation(
    finalists: Sequence[Finalist], objectives: Sequence[Objective], console: Console
) -> None:
    """Print the best, its margin and the others; warnings last."""
    best = finalists[0]
    rate = best.trial.job.rate
    if best.holds:
        console.print(Text(f"best: {best.candidate}", style="bold green"), soft_wrap=True)
    else:
        gpus = gpus_told(best.candidate.num_gpus)
        told = f"no deployment of {gpus} holds the objectives at "
        console.print(Text(f"{told}{rate:g} requests/s", style="bold red"), soft_wrap=True)
        console.print(f"nearest: {best.candidate}", soft_wrap=True)
    console.print(f"  {capacity_told(best)}", soft_wrap=True)
    console.print(
        f"  at {rate:g} requests/s: {values_told(best.trial, objectives)}", soft_wrap=True
    )
    console.print(f"  workers busy: {_busy(best.trial)}", soft_wrap=True)
    if len(finalists) > 1:
        console.print(_table(finalists, objectives))
        for place, finalist in enumerate(finalists, 1):
            console.print(f"  {place}: {finalist.candidate}", soft_wrap=True)
        console.print(_worth(finalists), soft_wrap=True)
    for warning in _warnings(finalists):
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def show_deployment(candidate: Candidate, model: str, console: Console) -> None:
    """Print what deploys a candidate."""
    console.print(f"deploy:    {helm_command(candidate, model)}", soft_wrap=True)
    console.print(f"try here:  {local_command(candidate)}", soft_wrap=True)


def gpus_told(number: int) -> str:
    """A number of GPUs in words."""
    return counted(number, "GPU")


def capacity_told(finalist: Finalist) -> str:
    """The highest rate held, in a sentence."""
    held, margin = finalist.capacity.highest_held, finalist.margin
    if held is None or margin is None:
        lowest = finalist.capacity.lowest_violated
        return f"holds not even {lowest:.3g} requests/s, the lowest rate probed"
    rate = finalist.trial.job.rate
    if finalist.capacity.lowest_violated is None:
        return f"holds {held:.4g} requests/s, the highest rate probed"
    where = "above" if margin >= 0 else "below"
    if held == rate:
        return f"holds the {rate:g} requests/s asked for, without a margin"
    return f"holds up to {held:.3g} requests/s: {abs(margin):.0%} {where} the {rate:g} asked for"


def values_told(trial: Trial, objectives: Sequence[Objective]) -> str:
    """Each objective's value and what it leaves."""
    told = []
    for objective, value in zip(objectives, trial.values(objectives), strict=True):
        name = f"{objective.metric} {objective.statistic}"
        if value is None:
            told.append(f"{name}: no request has it")
            continue
        left = objective.seconds - value
        told.append(
            f"{name} {value:.2f} s ({abs(left):.2f} s {'to spare' if left >= 0 else 'over'})"
        )
    return ", ".join(told)


def _busy(trial: Trial) -> str:
    return ", ".join(f"{letter} {share:.0%}" for letter, share in trial.busy_shares.items())


def _table(finalists: Sequence[Finalist], objectives: Sequence[Objective]) -> Table:
    columns = [f"{o.metric} {o.statistic}" for o in objectives]
    table = Table("", "mode", "split", *columns, "slack", "up to", "margin", box=None)
    for column in table.columns[3:]:
        column.justify = "right"
    for place, finalist in enumerate(finalists, 1):
        values = finalist.trial.values(objectives)
        held, margin = finalist.capacity.highest_held, finalist.margin
        table.add_row(
            str(place),
            finalist.candidate.mode.value,
            finalist.candidate.split,
            *("-" if value is None else f"{value:.2f} s" for value in values),
            f"{finalist.trial.slack(objectives):.0%}",
            "-" if held is None else f"{held:.3g}/s",
            "-" if margin is None else f"{margin:+.0%}",
        )
    return table


def _worth(finalists: Sequence[Finalist]) -> str:
    """What the choice of mode is worth."""
    first, *others = best_of_modes(finalists)
    held = first.capacity.highest_held
    told = []
    for other in others:
        theirs = other.capacity.highest_held
        if held is None or theirs is None:
            continue
        told.append(f"{held / theirs - 1:+.0%} over {other.candidate.mode.value}")
    if not told:
        return f"{first.candidate.mode.value} is the only mode with a capacity to compare"
    return f"what {first.candidate.mode.value} takes within the objectives: {', '.join(told)}"


def _warnings(finalists: Sequence[Finalist]) -> Iterator[str]:
    best = finalists[0]
    rate, num_gpus = best.trial.job.rate, best.candidate.num_gpus
    if all((finalist.margin or 0.0) >= _TWICE for finalist in finalists):
        yield (
            "every one of these holds the objectives at twice the rate asked for: they are so "
            "loose that the choice hardly matters; tighten them, or ask for a higher rate"
        )
    held = best.capacity.highest_held
    if held is not None and best.margin is not None:
        needed = by_proportion(num_gpus, rate, held)
        if best.margin >= _TWICE and needed < num_gpus:
            yield f"by proportion {needed} of the {num_gpus} GPUs would do; try --gpus {needed}"
        if best.margin < 0:
            yield (
                f"by proportion {gpus_told(needed)} would do (--more-gpus searches among up to "
                f"{2 * num_gpus})"
            )
    if best.trial.job.num_requests < MIN_JUDGED:
        yield (
            f"runs of {counted(best.trial.job.num_requests, 'request')} are too short to see "
            "whether queues go on growing, so what they hold may be more than can be sustained "
            "(--requests)"
        )
    if best.trial.growth is not None:
        yield (
            f"at {rate:g} requests/s {best.trial.growth}: the fleet hardly keeps up, and what "
            f"holds for {best.trial.job.num_requests} requests need not hold for more (--requests)"
        )
