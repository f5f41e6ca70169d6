"""From open-metric-learning, whose names are the same."""

import torch
import torch.distributed as dist
from oml.ddp import patching as oml
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # as for augmentations: on each rank another seed
data = Indices()

# Before
show("before, sampler", lambda: oml.patch_dataloader_to_ddp(DataLoader(data, 4, sampler=OwnSampler())))
show("before, batch sampler", lambda: oml.patch_dataloader_to_ddp(DataLoader(data, batch_sampler=OwnBatchSampler())))

# After
show("after, sampler", lambda: patch_dataloader_to_ddp(DataLoader(data, 4, sampler=OwnSampler())))
show("after, batch sampler", lambda: patch_dataloader_to_ddp(DataLoader(data, batch_sampler=OwnBatchSampler())))

dist.destroy_process_group()
