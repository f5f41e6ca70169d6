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

own = DataLoader(Indices(), batch_size=4, sampler=OwnSampler())
batched = DataLoader(Indices(), batch_sampler=OwnBatchSampler())

# Before
show("before, sampler", lambda: fabric.setup_dataloaders(own))
show("before, batch sampler", lambda: fabric.setup_dataloaders(batched))

# After: Fabric still moves batches to the device.
show("after, sampler", lambda: fabric.setup_dataloaders(patch_dataloader_to_ddp(own)))
show("after, batch sampler", lambda: fabric.setup_dataloaders(patch_dataloader_to_ddp(batched)))

dist.destroy_process_group()
