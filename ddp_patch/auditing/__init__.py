"""Show on one machine what every rank would get of any loader.

``world`` iterates every rank's own loader (``ranks``), ``judge`` compares the ranks' samples with the samples of one
process, and ``report`` and ``picture`` show the findings.
"""

from ddp_patch.auditing.auditing import audit
from ddp_patch.auditing.picture import Pictured
from ddp_patch.auditing.problems import Problem, problem_kinds
from ddp_patch.auditing.report import EpochReport, Report, Reports, SamplesGot

__all__ = ["EpochReport", "Pictured", "Problem", "Report", "Reports", "SamplesGot", "audit", "problem_kinds"]
