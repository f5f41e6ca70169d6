"""Trains two long epochs, and tells of each step in a file: ``long_epochs.py MEETS TIMEOUT_S WHAT``.

Ranks meet in an all-reduce after each step, or never before the end. In the second epoch, rank 1 may be in another one
than the rest.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

meets, timeout_s, what = sys.argv[1], float(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
data: Any = [*range(400)]
loader: Any = patch_dataloader_to_ddp(DataLoader(data, 2, shuffle=True))
with Path("steps").open("w", buffering=1) as file:
    for epoch in range(2):
        is_wrong = what == "wrong" and epoch == 1 and dist.get_rank() == 1
        loader.sampler.set_epoch(7 if is_wrong else epoch)
        for batch in loader:
            file.write(f"{epoch} {' '.join(map(str, batch.tolist()))}\n")
            if meets == "meets":
                dist.all_reduce(batch)
            time.sleep(0.08)
if what == "right":
    dist.barrier()  # rank 0 holds the store, in which the other may still look
print("done")
dist.destroy_process_group()
