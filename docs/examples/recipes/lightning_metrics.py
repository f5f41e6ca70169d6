"""Train with Lightning on any number of GPUs, or of processes on a CPU, and log metrics that count each sample once.

It draws all classes equally often. Killed at any moment, it goes on from its last checkpoint, on any number of devices.
Start it, and start it again, with ``python lightning_metrics.py 2 FOLDER``: on two devices.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from ddp_patch import gather_step
from ddp_patch.integrations.lightning import PatchDataLoaders

Loader = DataLoader[tuple[Tensor, ...]]  # of images and labels


def make_loaders() -> tuple[Loader, Loader]:
    """Return a loader for training and one for validation, as for one process: your data go here."""
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    images = images.float() / 16
    training, validation = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
    weights = 1 / labels[:1500].bincount()[labels[:1500]]
    sampler = WeightedRandomSampler(weights.tolist(), num_samples=1500)
    return DataLoader(training, batch_size=32, sampler=sampler), DataLoader(validation, batch_size=32)


class Classifier(LightningModule):
    """Any module, whose metrics are updated with the outputs of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        # Every rank sees all samples, so torchmetrics has nothing to add up.
        accuracy = MulticlassAccuracy(10, average="micro", sync_on_compute=False)
        self.metrics = MetricCollection({"accuracy": accuracy, "F1": MulticlassF1Score(10, sync_on_compute=False)})

    def training_step(self, batch: Any) -> Tensor:
        """Return the loss."""
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def validation_step(self, batch: Any) -> None:
        """Update the metrics with this step's samples of all ranks, without padding."""
        images, labels = batch
        self.metrics.update(*gather_step((self.network(images), labels), self.trainer.val_dataloaders))
        self.log_dict(self.metrics)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(devices: int, folder: Path) -> None:
    """Train from the last checkpoint on, or from the beginning."""
    seed_everything(0)
    patch = PatchDataLoaders(share="within_batches")  # batches and learning rate stay those of one process
    kept = ModelCheckpoint(folder, every_n_train_steps=10, save_last=True)
    trainer = Trainer(devices=devices, max_epochs=3, callbacks=[patch, kept], logger=False)
    trainer.fit(Classifier(), *make_loaders(), ckpt_path="last")
    if trainer.is_global_zero:
        print(", ".join(f"{name} {float(value):.3f}" for name, value in trainer.callback_metrics.items()))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
