"""Lightning Fabric: train on two ranks."""

import torch
from lightning.fabric import Fabric
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp

fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
fabric.seed_everything(0)  # so that all ranks make the same random data
x = torch.randn(64, 3)
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
loader = fabric.setup_dataloaders(patch_dataloader_to_ddp(loader))
model = torch.nn.Linear(3, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        fabric.backward(mse_loss(model(inputs), targets))
        optimizer.step()
