"""Zero lines: while this is on, a script's loaders are patched when it first uses them."""

from ddp_patch.running.autopatching import autopatch, leave_alone, unpatched

__all__ = ["autopatch", "leave_alone", "unpatched"]
