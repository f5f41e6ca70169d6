"""Lightning Fabric: ``Fabric.setup_dataloaders``."""

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from lightning.fabric import Fabric

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import tiny_model
from frameworks.loops import train

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Set up model and loader."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # the ranks were started by something else than Fabric
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    if patched:
        loader = patch_dataloader_to_ddp(loader)
    model = fabric.setup_module(tiny_model())
    ready = fabric.setup_dataloaders(loader)
    going_on = [epoch for epoch in epochs if epoch is None]
    seen = train(model, ready, going_on, backward=fabric.backward)
    for epoch in epochs[len(going_on) :]:
        # Fabric's loader calls set_epoch itself, at each pass; to go back, one passes over the loader it was given.
        loader.sampler.set_epoch(epoch)
        seen += train(model, map(fabric.to_device, loader), [None], backward=fabric.backward)
    return seen


FRAMEWORK = Framework(("lightning",), passes, moves=True)
