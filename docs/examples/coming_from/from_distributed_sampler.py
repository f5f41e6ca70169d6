"""From torch's DistributedSampler."""

import torch
import torch.distributed as dist
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader, DistributedSampler

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # as for augmentations: on each rank another seed
data = Indices()

# Before: there is no place for a sampler or a batch sampler, and epochs differ only by calling set_epoch.
show("before", lambda: DataLoader(data, batch_size=4, sampler=DistributedSampler(data)))

# After
show("after", lambda: patch_dataloader_to_ddp(DataLoader(data, batch_size=4, shuffle=True)))
show("after, sampler", lambda: patch_dataloader_to_ddp(DataLoader(data, batch_size=4, sampler=OwnSampler())))
show("after, batch sampler", lambda: patch_dataloader_to_ddp(DataLoader(data, batch_sampler=OwnBatchSampler())))

dist.destroy_process_group()
