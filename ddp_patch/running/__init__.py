"""Zero lines: while this is on, a script's loaders are patched when it first uses them."""

from ddp_patch.running.context import autopatch
from ddp_patch.running.loader_reports import leave_alone, unpatched

__all__ = ["autopatch", "leave_alone", "unpatched"]
