"""Show on one machine what every rank would get of any loader.

``world`` iterates every rank's own loader (``ranks``), ``judge`` compares what they gave with what one process gets,
and ``report`` and ``picture`` say what was found, and decide nothing.
"""

from ddp_patch.auditing.auditing import audit
from ddp_patch.auditing.picture import Pictured
from ddp_patch.auditing.problems import Problem, problem_kinds
from ddp_patch.auditing.report import EpochReport, Report, Reports

__all__ = ["EpochReport", "Pictured", "Problem", "Report", "Reports", "audit", "problem_kinds"]
