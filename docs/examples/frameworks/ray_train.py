"""Ray Train: train on two workers that Ray starts."""

from pathlib import Path

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp


def train() -> None:
    """What each worker does."""
    torch.manual_seed(0)  # so that all workers make the same random data
    x = torch.randn(64, 3)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    loader = prepare_data_loader(patch_dataloader_to_ddp(loader))  # puts batches on the worker's device
    model = prepare_model(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()


results = RunConfig(storage_path=str(Path("results").absolute()))
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=results).fit()
