"""The figures, one module each. Every function draws one file and hands back a ``Drawn``.

All raise ``NothingToDraw`` where the runs given have nothing for them, with what would provide it.
"""

from sangam_loadtest.report.figures.breakdown import latency_breakdown
from sangam_loadtest.report.figures.distributions import queueing_and_decode_cdfs
from sangam_loadtest.report.figures.iterations import iterations_against_output
from sangam_loadtest.report.figures.latency import latency_against_rate
from sangam_loadtest.report.figures.passes import decode_time_against_batch
from sangam_loadtest.report.figures.tau import tau_sweep

__all__ = [
    "decode_time_against_batch",
    "iterations_against_output",
    "latency_against_rate",
    "latency_breakdown",
    "queueing_and_decode_cdfs",
    "tau_sweep",
]
