"""accelerate in a notebook: start the ranks from a cell."""

import torch
from accelerate import Accelerator, notebook_launcher
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp


def train() -> None:
    """What each rank does; make loaders and models in here."""
    Accelerator(cpu=True)  # makes the process group; without cpu=True on GPUs
    loader = patch_dataloader_to_ddp(DataLoader(TensorDataset(torch.arange(10)), batch_size=2))
    for (numbers,) in loader:
        print(numbers.tolist())


notebook_launcher(train, num_processes=2)
