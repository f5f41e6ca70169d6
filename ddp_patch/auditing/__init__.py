"""Show on one machine what every rank would get of any loader.

``world`` iterates every rank's own loader. The modules named ``judge_`` compare what they gave, and ``inspection``
leads an audit through both, epoch by epoch. ``words``, ``picture`` and ``show`` say what was found, and decide nothing.
"""

from ddp_patch.auditing.auditing import DDPAudit, audit
from ddp_patch.auditing.judge_problems import Kind, Problem, problem_kinds
from ddp_patch.auditing.pictured import Pictured
from ddp_patch.auditing.report import Report, Reports
from ddp_patch.auditing.words import EpochReport

__all__ = ["DDPAudit", "EpochReport", "Kind", "Pictured", "Problem", "Report", "Reports", "audit", "problem_kinds"]
