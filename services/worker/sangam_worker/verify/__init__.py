"""Runs golden cases through scheduler and engine and compares token by token.

``python -m sangam_worker.verify DIR`` is the command; tests call ``run_cases``.
"""

from sangam_worker.verify.cases import Case, read_cases
from sangam_worker.verify.compare import first_difference
from sangam_worker.verify.drive import Ran, run_cases

__all__ = ["Case", "Ran", "first_difference", "read_cases", "run_cases"]
