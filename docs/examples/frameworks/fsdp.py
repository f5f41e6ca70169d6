"""FSDP2: shard the model and the data over the same mesh, on the ranks that torchrun starts."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # this rank's GPU
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
torch.manual_seed(0)  # so that all ranks make the same random data
x = torch.randn(64, 3)
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
loader = patch_dataloader_to_ddp(loader, device_mesh=mesh)
model = torch.nn.Linear(3, 1, device=device)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        mse_loss(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
dist.barrier()  # nobody ends while others still take part
dist.destroy_process_group()
