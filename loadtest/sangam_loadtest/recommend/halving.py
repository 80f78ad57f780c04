"""Successive halving: many candidates get short runs, the better half of them longer ones.

Z. Karnin, T. Koren and O. Somekh, "Almost Optimal Exploration in Multi-Armed Bandits", ICML 2013;
K. Jamieson and A. Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization", AISTATS 2016. A rung costs about as much as the one before it. Decides who goes on
and to which length; how a trial is run is the caller's. Called by ``search``.
"""

from collections.abc import Callable, Sequence

from sangam_loadtest.recommend.candidates import Candidate
from sangam_loadtest.recommend.trials import Trial

RATE_STEP = 1.25
EASY_SLACK = 0.25
MIN_LATENCIES = 8.0
Measure = Callable[[Sequence[Candidate], int], list[Trial]]
"""Trials of candidates with so many requests, in their order."""
Worth = Callable[[Trial], float]
"""What a trial is worth; more is better."""


def ranked(trials: Sequence[Trial], worth: Worth) -> list[Trial]:
    """The best first; equals stay in order, so what is listed first (a default) wins."""
    return sorted(trials, key=lambda trial: -worth(trial))


def kept(trials: Sequence[Trial], worth: Worth, num_kept: int) -> list[Trial]:
    """The best so many, and the best of each mode: what a mode gives is told to the end."""
    order = ranked(trials, worth)
    of_mode = {trial.candidate.mode: trial for trial in reversed(order)}
    best = {id(trial) for trial in (*order[:num_kept], *of_mode.values())}
    return [trial for trial in order if id(trial) in best]


def next_rate(rate: float, least: float, worths: Sequence[float]) -> float:
    """The rate of the next rung: where some hold the objectives and some do not.

    At a rate that all hold easily candidates differ by chance, at one that none holds by how they
    fail. A quarter more where over half of them hold with a quarter of their bound to spare, a
    quarter less where none holds.

    Args:
        least: the rate asked for, which none is below.
        worths: slacks at ``rate``.
    """
    order = sorted(worths)
    if order[(len(order) - 1) // 2] > EASY_SLACK:
        return rate * RATE_STEP
    return max(least, rate / RATE_STEP) if order[-1] < 0 else rate


def tells(before: Trial, length: int, rate: float) -> bool:
    """Whether a run of ``length`` requests lasts long enough at a rate to tell of overload.

    A system takes any rate for as long as a few requests take: they come into an empty system, and
    the last of them have it to themselves. So runs last eight mean latencies.

    Args:
        before: the trial, or one at a lower rate, by which the latency is judged.
    """
    latency = before.summary.distributions.get("latency")
    return latency is not None and length / rate >= MIN_LATENCIES * latency.mean


def lasts(trial: Trial) -> bool:
    """Whether a trial lasts long enough for what it holds to mean something."""
    return tells(trial, trial.job.num_requests, trial.job.rate)


def halved(
    candidates: Sequence[Candidate],
    lengths: Sequence[int],
    measure: Measure,
    worth: Worth,
    num_kept: int,
) -> list[Trial]:
    """The trials of the last rung, the best first.

    Where a rung would leave out nobody, the last one follows.

    Args:
        lengths: requests of each rung, rising.
        num_kept: no rung has fewer candidates, if there are as many.
    """
    left, rungs = list(candidates), list(lengths)
    while len(rungs) > 1 and len(left) > num_kept:
        trials = measure(left, rungs.pop(0))
        half = kept(trials, worth, max(num_kept, -(-len(left) // 2)))
        if len(half) == len(left):
            break
        left = [trial.candidate for trial in half]
    return ranked(measure(left, rungs[-1]), worth)
