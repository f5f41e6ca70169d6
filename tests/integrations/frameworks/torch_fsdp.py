"""FSDP2, ``fully_shard``, over a mesh of all ranks."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import tiny_model
from frameworks.loops import train

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Shard the model, and share the data, over the same mesh."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    if patched:
        loader = patch_dataloader_to_ddp(loader, device_mesh=mesh)
    model = fully_shard(tiny_model(), mesh=mesh)
    return train(model, loader, epochs, set_epoch=lambda epoch: loader.sampler.set_epoch(epoch))


FRAMEWORK = Framework(("torch",), passes, moves=False)
