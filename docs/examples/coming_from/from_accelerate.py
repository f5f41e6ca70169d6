"""From accelerate."""

from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from ranks import Indices, OwnBatchSampler, OwnSampler, UnequalBatchSampler, show
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

# Before: each batch of one process is split over the ranks.
splitting = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
unequal = DataLoader(Indices(), batch_sampler=UnequalBatchSampler())
show("split, sampler", lambda: splitting.prepare(own), divided=True)
show("split, batches", lambda: splitting.prepare(batched), divided=True)
show("split, unequal", lambda: splitting.prepare(unequal), divided=True)

# After
divided = partial(patch_dataloader_to_ddp, share="within_batches")
show("divided, sampler", lambda: prepare_patched(accelerator, divided(own)), divided=True)
show("divided, batches", lambda: prepare_patched(accelerator, divided(batched)), divided=True)
show("divided, unequal", lambda: prepare_patched(accelerator, divided(unequal)), divided=True)

accelerator.end_training()
