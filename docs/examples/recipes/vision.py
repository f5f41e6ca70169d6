"""Train an image classifier on any number of GPUs, or of processes on a CPU.

It draws all classes equally often, computes in mixed precision, and validates after each epoch. Killed at any moment,
it goes on from its last checkpoint, on any number of GPUs: batches and learning rate stay those of one process.

Start it, and start it again, with ``torchrun --standalone --nproc-per-node 2 vision.py checkpoint.pt``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from ddp_patch import gather_step, iter_with_weights, loader_state, patch_dataloader_to_ddp, restore_loader

EPOCHS, BATCH_SIZE, STEPS_PER_CHECKPOINT = 3, 64, 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Loader = DataLoader[tuple[Tensor, ...]]  # of images and labels


def make_loaders() -> tuple[Loader, Loader]:
    """Return a loader for training and one for validation, as for one process: your data go here."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    training, validation = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])
    weights = 1 / labels[:1500].bincount()[labels[:1500]]
    sampler = WeightedRandomSampler(weights.tolist(), num_samples=1500)
    return DataLoader(training, BATCH_SIZE, sampler=sampler, num_workers=2), DataLoader(validation, BATCH_SIZE)


def make_network() -> nn.Module:
    """Return the network: yours goes here."""
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def main(file: Path) -> None:
    """Train from the checkpoint on, or from the beginning."""
    # Every rank reads it before the patch, where all meet: so no rank has written the next one yet.
    checkpoint = torch.load(file, map_location=DEVICE, weights_only=True) if file.exists() else None
    torch.manual_seed(0)  # the order and the parameters are those of rank 0, which this seeds
    training, validation = patch_dataloader_to_ddp(make_loaders(), share="within_batches")
    network = make_network().to(DEVICE)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=EPOCHS * len(training))
    saved: dict[str, Any] = {"network": network, "optimizer": optimizer, "schedule": schedule}
    first_epoch = 0
    if checkpoint:
        for name, part in saved.items():
            part.load_state_dict(checkpoint[name])
        restore_loader(training, checkpoint["training"])
        first_epoch = checkpoint["training"]["epoch"]

    for epoch in range(first_epoch, EPOCHS):  # the first pass after a restore gives the rest of its epoch
        for step, ((images, labels), weights) in enumerate(iter_with_weights(training), start=1):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                losses = cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE), reduction="none")
            (losses.float() * weights.to(DEVICE)).sum().backward()
            optimizer.step()
            schedule.step()
            if dist.get_rank() == 0 and step % STEPS_PER_CHECKPOINT == 0:
                states = {name: part.state_dict() for name, part in saved.items()}
                save({**states, "training": loader_state(training)}, file)
        metrics = validate(network, validation)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.3f}" for name, value in metrics.items()))


@torch.no_grad()
def validate(network: nn.Module, loader: Loader) -> dict[str, float]:
    """Return the metrics of all samples, each counted once, on every rank."""
    accuracy = MulticlassAccuracy(10, average="micro", sync_on_compute=False)  # every rank sees all samples
    metrics = MetricCollection({"accuracy": accuracy, "F1": MulticlassF1Score(10, sync_on_compute=False)}).to(DEVICE)
    network.eval()
    for images, labels in loader:
        metrics.update(*gather_step((network(images.to(DEVICE)), labels.to(DEVICE)), loader))
    network.train()
    return {name: float(value) for name, value in metrics.compute().items()}


def save(checkpoint: dict[str, Any], file: Path) -> None:
    """Write a file of which, whenever this process is killed, either the old or the new one is there."""
    torch.save(checkpoint, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # this rank's GPU
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
