"""``DistributedDataParallel`` and a loop of one's own."""

from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import tiny_model
from frameworks.loops import train

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Hand the loader to nothing but the loop."""
    if patched:
        loader = patch_dataloader_to_ddp(loader)
    model = DistributedDataParallel(tiny_model())
    return train(model, loader, epochs, set_epoch=lambda epoch: loader.sampler.set_epoch(epoch))


FRAMEWORK = Framework(("torch",), passes, moves=False)
