"""accelerate: train on the ranks that torchrun or ``accelerate launch`` starts."""

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.integrations.accelerate import prepare_patched

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)  # without cpu=True on GPUs
torch.manual_seed(0)  # so that all ranks make the same random data
x = torch.randn(64, 3)
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
loader = prepare_patched(accelerator, patch_dataloader_to_ddp(loader))
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
