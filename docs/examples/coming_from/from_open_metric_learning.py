"""From open-metric-learning, whose names are the same."""

import torch
import torch.distributed as dist
from oml.ddp import patching as oml
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # as for augmentations: on each rank another seed

own = DataLoader(Indices(), batch_size=4, sampler=OwnSampler())
batched = DataLoader(Indices(), batch_sampler=OwnBatchSampler())

# Before
show("before, sampler", lambda: oml.patch_dataloader_to_ddp(own))
show("before, batch sampler", lambda: oml.patch_dataloader_to_ddp(batched))

# After
show("after, sampler", lambda: patch_dataloader_to_ddp(own))
show("after, batch sampler", lambda: patch_dataloader_to_ddp(batched))

dist.destroy_process_group()
