"""An order that rank 0 alone can draw, here from the system's entropy: every rank gets its list before the patch.

Start it with ``torchrun --standalone --nproc-per-node 2 docs/examples/order_of_rank_0.py``.
"""

from random import SystemRandom
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

N = 8
data: Any = range(N)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    orders: list[Any] = [SystemRandom().sample(range(N), N)] if rank == 0 else [None]
    dist.broadcast_object_list(orders)
    loader: DataLoader[Any] = patch_dataloader_to_ddp(DataLoader(data, sampler=orders[0]))
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, [int(batch) for batch in loader])
    if rank == 0:
        print(f"together the ranks saw {sorted(item for share in shares for item in share)}")
    dist.monitored_barrier()
    dist.destroy_process_group()
