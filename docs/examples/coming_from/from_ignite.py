"""From ignite's auto_dataloader."""

from functools import partial

import ignite.distributed as idist
import torch
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

idist.initialize("gloo")
torch.manual_seed(idist.get_rank())  # as for augmentations: on each rank another seed

own = DataLoader(Indices(), batch_size=4, sampler=OwnSampler())
batched = DataLoader(Indices(), batch_sampler=OwnBatchSampler())

# Before: batch_size is that of all ranks together.
before = partial(idist.auto_dataloader, Indices())
show("before, sampler", lambda: before(batch_size=8, sampler=OwnSampler()))
show("before, batch sampler", lambda: before(batch_sampler=OwnBatchSampler()))

# After: batch_size is that of each rank.
show("after, sampler", lambda: patch_dataloader_to_ddp(own))
show("after, batch sampler", lambda: patch_dataloader_to_ddp(batched))

idist.finalize()
