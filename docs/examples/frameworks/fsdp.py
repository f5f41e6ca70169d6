"""FSDP2: shard the model and the data over the same mesh, on the ranks that torchrun starts."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")  # "nccl" on GPUs
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))  # "cuda" on GPUs
torch.manual_seed(0)  # so that all ranks make the same random data
x = torch.randn(64, 3)
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
loader = patch_dataloader_to_ddp(loader, device_mesh=mesh)
model = torch.nn.Linear(3, 1)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.monitored_barrier()  # nobody ends while others still take part
dist.destroy_process_group()
