"""Takes the rank's number on its node for its number among all, in one of two ways."""

import os
import sys
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
numbers: Any = {"rank": int(os.environ["LOCAL_RANK"]), "num_replicas": dist.get_world_size()}
data: Any = [*range(40)]
if sys.argv[1] == "sampler":
    loader = patch_dataloader_to_ddp(DataLoader(data, 4, sampler=DistributedSampler(data, **numbers)))
else:
    loader = patch_dataloader_to_ddp(DataLoader(data, 4), **numbers)
for batch in loader:
    dist.all_reduce(batch.sum())
dist.destroy_process_group()
