"""From torch's DistributedSampler."""

import torch
import torch.distributed as dist
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader, DistributedSampler

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # as for augmentations: on each rank another seed

own = DataLoader(Indices(), batch_size=4, sampler=OwnSampler())
batched = DataLoader(Indices(), batch_sampler=OwnBatchSampler())

# Before: neither sampler can be used. set_epoch was forgotten.
sampler: DistributedSampler[int] = DistributedSampler(Indices())
show("before", lambda: DataLoader(Indices(), batch_size=4, sampler=sampler))

# After
show("after, sampler", lambda: patch_dataloader_to_ddp(own))
show("after, batch sampler", lambda: patch_dataloader_to_ddp(batched))

dist.destroy_process_group()
