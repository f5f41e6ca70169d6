"""From accelerate."""

import torch
from accelerate import Accelerator
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

accelerator = Accelerator(cpu=True)
torch.manual_seed(accelerator.process_index)  # as for augmentations: on each rank another seed
data = Indices()

# Before
show("before, sampler", lambda: accelerator.prepare(DataLoader(data, 4, sampler=OwnSampler())))
show("before, batch sampler", lambda: accelerator.prepare(DataLoader(data, batch_sampler=OwnBatchSampler())))

# After: the model and the optimizer still go through prepare; batches go to accelerator.device in the loop.
show("after, sampler", lambda: patch_dataloader_to_ddp(DataLoader(data, 4, sampler=OwnSampler())))
show("after, batch sampler", lambda: patch_dataloader_to_ddp(DataLoader(data, batch_sampler=OwnBatchSampler())))

accelerator.end_training()
