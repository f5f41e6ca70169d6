"""From Lightning."""

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(fabric.global_rank)  # as for augmentations: on each rank another seed
data = Indices()

# Before
show("before, sampler", lambda: fabric.setup_dataloaders(DataLoader(data, 4, sampler=OwnSampler())))
show("before, batch sampler", lambda: fabric.setup_dataloaders(DataLoader(data, batch_sampler=OwnBatchSampler())))


# After: Fabric still moves batches to the device. A Trainer has the same option.
def patched(loader: "DataLoader[int]") -> "DataLoader[int]":
    """Share the loader here, and not in Fabric."""
    moved: DataLoader[int] = fabric.setup_dataloaders(patch_dataloader_to_ddp(loader), use_distributed_sampler=False)
    return moved


show("after, sampler", lambda: patched(DataLoader(data, 4, sampler=OwnSampler())))
show("after, batch sampler", lambda: patched(DataLoader(data, batch_sampler=OwnBatchSampler())))

dist.destroy_process_group()
