"""Show on one machine what every rank would get of any loader.

``draw`` runs the sampling of every rank and ``judge`` compares what they got. ``inspection`` collects this into a
``report``, and ``show`` draws its figures.
"""

from ddp_patch.auditing.auditing import audit
from ddp_patch.auditing.epoch_report import EpochReport, Kind, Pictured, Problem, problem_kinds
from ddp_patch.auditing.report import Report, Reports

__all__ = ["EpochReport", "Kind", "Pictured", "Problem", "Report", "Reports", "audit", "problem_kinds"]
