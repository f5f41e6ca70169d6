"""From ignite's auto_dataloader."""

import ignite.distributed as idist
import torch
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

idist.initialize("gloo")
torch.manual_seed(idist.get_rank())  # as for augmentations: on each rank another seed
data = Indices()

# Before: batch_size is that of all ranks together.
show("before, sampler", lambda: idist.auto_dataloader(data, batch_size=8, sampler=OwnSampler()))
show("before, batch sampler", lambda: idist.auto_dataloader(data, batch_sampler=OwnBatchSampler()))

# After: batch_size is that of each rank.
show("after, sampler", lambda: patch_dataloader_to_ddp(DataLoader(data, 4, sampler=OwnSampler())))
show("after, batch sampler", lambda: patch_dataloader_to_ddp(DataLoader(data, batch_sampler=OwnBatchSampler())))

idist.finalize()
