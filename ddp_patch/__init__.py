"""Give each distributed rank its own part of a finished ``DataLoader``, with its sampler intact, in one line."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from ddp_patch.costs import Cost
from ddp_patch.errors import DDPPatchError, DDPPatchWarning
from ddp_patch.loader import PatchedLoader, assert_loaders_patched, check_loaders_is_patched
from ddp_patch.loaders.copying import extract_loader_parameters
from ddp_patch.patching import patch_dataloader_to_ddp
from ddp_patch.wrappers import DDPBatchSamplerWrapper, DDPSamplerWrapper

if TYPE_CHECKING:
    from ddp_patch.auditing import audit
    from ddp_patch.evaluation import gather_in_order, gather_step, iter_with_mask, iter_with_weights
    from ddp_patch.resume import loader_state, restore_loader
    from ddp_patch.running import autopatch, leave_alone, unpatched
else:
    # Names that the first patch does not need are imported on use.
    _LATER = {
        "ddp_patch.auditing": ["audit"],
        "ddp_patch.evaluation": ["gather_in_order", "gather_step", "iter_with_mask", "iter_with_weights"],
        "ddp_patch.resume": ["loader_state", "restore_loader"],
        "ddp_patch.running": ["autopatch", "leave_alone", "unpatched"],
    }

    def __getattr__(name):
        """Import a late name on use."""
        if name == "samplers":  # users write `ddp_patch.samplers` without an import of it
            return import_module("ddp_patch.samplers")
        for module, names in _LATER.items():
            if name in names:
                return getattr(import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Cost",
    "DDPBatchSamplerWrapper",
    "DDPPatchError",
    "DDPPatchWarning",
    "DDPSamplerWrapper",
    "PatchedLoader",
    "assert_loaders_patched",
    "audit",
    "autopatch",
    "check_loaders_is_patched",
    "extract_loader_parameters",
    "gather_in_order",
    "gather_step",
    "iter_with_mask",
    "iter_with_weights",
    "leave_alone",
    "loader_state",
    "patch_dataloader_to_ddp",
    "restore_loader",
    "unpatched",
]
__version__ = "0.1.0"

if "DDP_PATCH_GUARD" in os.environ:  # a guarded test sets this variable for the processes that it starts
    import_module("ddp_patch.testing.ranks").guard_this_process()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
