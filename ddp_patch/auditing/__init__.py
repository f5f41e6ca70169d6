"""Prove on one machine what every rank would get of any loader.

``draw`` runs the sampling of every rank and ``judge`` compares what they got. ``inspection`` collects this into a
``report``, and ``show`` turns reports into pictures.
"""

from ddp_patch.auditing.auditing import audit
from ddp_patch.auditing.epoch_report import EpochReport
from ddp_patch.auditing.pictured import Pictured
from ddp_patch.auditing.report import Kind, Problem, Report, problem_kinds

__all__ = ["EpochReport", "Kind", "Pictured", "Problem", "Report", "audit", "problem_kinds"]
