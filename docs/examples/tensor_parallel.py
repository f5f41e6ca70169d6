"""Two by two ranks: the data is sharded over dp, and the same for both ranks of tp."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
loader = patch_dataloader_to_ddp(DataLoader(TensorDataset(torch.arange(8)), batch_size=2), device_mesh=mesh)

batches: list[list[list[int]]] = [[]] * dist.get_world_size()
dist.all_gather_object(batches, [batch.tolist() for (batch,) in loader])
if dist.get_rank() == 0:
    for rank, share in enumerate(batches):
        print(f"rank {rank}, dp {rank // 2}, tp {rank % 2}: {share}")
dist.monitored_barrier()  # nobody ends while others still take part
dist.destroy_process_group()
