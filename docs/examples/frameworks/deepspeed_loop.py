"""DeepSpeed: train on the ranks that torchrun starts; with a checkpoint's folder as argument, resume from it."""

import sys
from pathlib import Path

import deepspeed
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader

torch.manual_seed(0)  # so that all ranks make the same random data
x = torch.randn(64, 3)
loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
model = torch.nn.Linear(3, 1)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
loader = patch_dataloader_to_ddp(loader)
begun = 0
if len(sys.argv) > 1:
    checkpoint = Path(sys.argv[1])
    _, kept = engine.load_checkpoint(checkpoint.parent, checkpoint.name)
    begun = kept["epoch"]
    restore_loader(loader, kept["loader"])
for epoch in range(begun, 2):
    for inputs, targets in loader:
        accumulated = engine.is_gradient_accumulation_boundary()  # of the batch that comes, so ask before step()
        engine.backward(mse_loss(engine(inputs), targets))
        engine.step()
        if accumulated and engine.global_steps == 3:
            engine.save_checkpoint("checkpoints", client_state={"epoch": epoch, "loader": loader_state(loader)})
deepspeed.comm.destroy_process_group()
