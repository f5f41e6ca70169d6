"""Composer: train on the ranks that ``composer`` starts; with a checkpoint's file as argument, resume from it."""

import sys
from typing import Any

import torch
from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader


class LoaderPosition(Callback):  # type: ignore[misc]  # Composer's types are not installed
    """Keeps the loader's position in Composer's checkpoints."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return loader_state(self.loader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what a checkpoint has kept."""
        restore_loader(self.loader, state)


dist.initialize_dist("cpu")  # before the patch
torch.manual_seed(0)  # so that all ranks make the same random data
x = torch.randn(66, 3)
data = TensorDataset(x, (x.sum(dim=1) > 0).long())
loaders = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)
loader, val_loader = patch_dataloader_to_ddp(loaders)
model = ComposerClassifier(torch.nn.Linear(3, 2), num_classes=2)
Trainer(
    model=model,
    train_dataloader=loader,
    eval_dataloader=val_loader,
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    max_duration="2ep",
    device="cpu",
    callbacks=LoaderPosition(loader),
    spin_dataloaders=False,  # else a resumed Trainer skips as many batches once more
    save_folder="checkpoints",
    save_filename="ba{batch}.pt",
    save_interval="3ba",
    save_overwrite=True,
    load_path=sys.argv[1] if len(sys.argv) > 1 else None,
).fit()
