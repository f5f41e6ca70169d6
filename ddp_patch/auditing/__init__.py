"""Prove any loader on one machine: what every rank of a made-up world would get of it.

Its parts: ``made_up_world`` draws every rank, ``counting`` and ``judge`` compare what they got, ``report`` says it.
"""

from ddp_patch.auditing.auditing import audit
from ddp_patch.auditing.pictured import Pictured
from ddp_patch.auditing.report import EpochReport, Kind, Problem, Report, problem_kinds

__all__ = ["EpochReport", "Kind", "Pictured", "Problem", "Report", "audit", "problem_kinds"]
