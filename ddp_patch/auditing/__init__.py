"""Show on one machine what every rank would get of any loader.

``world`` iterates every rank's own loader, the modules named ``judge_`` compare what they gave, and those named
``show_`` make reports of it. ``inspection`` leads an audit through the three, epoch by epoch.
"""

from ddp_patch.auditing.auditing import DDPAudit, audit
from ddp_patch.auditing.judge_problems import Kind, Problem, problem_kinds
from ddp_patch.auditing.show_figures import EpochReport
from ddp_patch.auditing.show_maps import Pictured
from ddp_patch.auditing.show_report import Report, Reports

__all__ = ["DDPAudit", "EpochReport", "Kind", "Pictured", "Problem", "Report", "Reports", "audit", "problem_kinds"]
