"""From catalyst's DistributedSamplerWrapper."""

import torch
import torch.distributed as dist
from catalyst.data import DistributedSamplerWrapper
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # as for augmentations: on each rank another seed

own = DataLoader(Indices(), batch_size=4, sampler=OwnSampler())
batched = DataLoader(Indices(), batch_sampler=OwnBatchSampler())

# Before
sampler = DistributedSamplerWrapper(OwnSampler())
batch_sampler = DistributedSamplerWrapper(OwnBatchSampler())
show("before, sampler", lambda: DataLoader(Indices(), batch_size=4, sampler=sampler))
show("before, batch sampler", lambda: DataLoader(Indices(), batch_sampler=batch_sampler))

# After
show("after, sampler", lambda: patch_dataloader_to_ddp(own))
show("after, batch sampler", lambda: patch_dataloader_to_ddp(batched))

dist.destroy_process_group()
