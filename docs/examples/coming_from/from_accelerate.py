"""From accelerate."""

import torch
from accelerate import Accelerator
from ranks import Indices, OwnBatchSampler, OwnSampler, show
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.integrations.accelerate import prepare_patched

accelerator = Accelerator(cpu=True)
torch.manual_seed(accelerator.process_index)  # as for augmentations: on each rank another seed

own = DataLoader(Indices(), batch_size=4, sampler=OwnSampler())
batched = DataLoader(Indices(), batch_sampler=OwnBatchSampler())

# Before
show("before, sampler", lambda: accelerator.prepare(own))
show("before, batch sampler", lambda: accelerator.prepare(batched))

# After
show("after, sampler", lambda: prepare_patched(accelerator, patch_dataloader_to_ddp(own)))
show("after, batch sampler", lambda: prepare_patched(accelerator, patch_dataloader_to_ddp(batched)))

accelerator.end_training()
