"""Ray Train: a ``TorchTrainer`` that leaves the loader alone."""

from collections.abc import Sequence
from typing import Any

from ray.train.torch import prepare_model

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import tiny_model
from frameworks.loops import train
from frameworks.ray_launch import launch

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Hand the loader to nothing but the loop."""
    if patched:
        loader = patch_dataloader_to_ddp(loader)
    return train(prepare_model(tiny_model()), loader, epochs, set_epoch=lambda epoch: loader.sampler.set_epoch(epoch))


FRAMEWORK = Framework(("ray",), passes, moves=False, launch=launch)
