"""Show on one machine what every rank would get of any loader.

``world`` iterates every rank's own loader (``ranks``), ``judge`` compares what they gave (``given``) with what one
process gets, and ``report``, ``picture`` and ``show`` say what was found, and decide nothing.
"""

from ddp_patch.auditing.auditing import DDPAudit, audit
from ddp_patch.auditing.pictured import Pictured
from ddp_patch.auditing.problems import Kind, Problem, problem_kinds
from ddp_patch.auditing.report import EpochReport, Report, Reports

__all__ = ["DDPAudit", "EpochReport", "Kind", "Pictured", "Problem", "Report", "Reports", "audit", "problem_kinds"]
