"""Train on a stream of Hugging Face, which the workers of all ranks read together: each file once an epoch.

Killed at any moment, it goes on from its last checkpoint, on as many ranks. Without ``share="by_worker"`` each rank
reads all files, and it goes on with any number of ranks.

Start it, and start it again, with ``torchrun --standalone --nproc-per-node 2 stream.py FOLDER``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset, load_dataset
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import multiclass_accuracy

from ddp_patch import gather_in_order, loader_state, patch_dataloader_to_ddp, restore_loader

EPOCHS, BATCH_SIZE, STEPS_PER_CHECKPOINT = 3, 16, 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def write_files(folder: Path) -> None:
    """Write eight files of images to train with, and one to validate with, in the place of yours."""
    images, labels = load_digits(return_X_y=True)
    rows = Dataset.from_dict({"image": images / 16, "label": labels}).with_format("torch")
    for place in range(8):
        rows.select(range(1500)).shard(8, place).to_parquet(folder / f"training-{place}.parquet")
    rows.select(range(1500, 1797)).to_parquet(folder / "validation.parquet")


def make_loaders(folder: Path) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a loader for training and one for validation, as for one process."""
    files = {"training": str(folder / "training-*.parquet"), "validation": str(folder / "validation.parquet")}
    streams = load_dataset("parquet", data_files=files, streaming=True, cache_dir=str(folder)).with_format("torch")
    shuffled = streams["training"].shuffle(seed=0, buffer_size=200)  # in another order in each epoch
    return DataLoader(shuffled, BATCH_SIZE, num_workers=2), DataLoader(streams["validation"], BATCH_SIZE)


def make_network() -> nn.Module:
    """Return the network: yours goes here."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main(folder: Path) -> None:
    """Train from the checkpoint on, or from the beginning."""
    file = folder / "checkpoint.pt"
    if not file.exists() and dist.get_rank() == 0:
        write_files(folder)
    dist.barrier()
    # Every rank reads it before the patch, where all meet: so no rank has written the next one yet.
    checkpoint = torch.load(file, map_location=DEVICE, weights_only=True) if file.exists() else None
    torch.manual_seed(0)  # the parameters are those of rank 0, which this seeds
    training, validation = make_loaders(folder)
    training = patch_dataloader_to_ddp(training, share="by_worker")
    validation = patch_dataloader_to_ddp(validation)  # by_worker can't tell which outputs are of which row
    network = make_network().to(DEVICE)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    first_epoch = 0
    if checkpoint:
        network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        restore_loader(training, checkpoint["training"])
        first_epoch = checkpoint["training"]["epoch"]

    for epoch in range(first_epoch, EPOCHS):  # the first pass after a restore gives the rest of its epoch
        for step, batch in enumerate(training, start=1):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch["image"].to(DEVICE)), batch["label"].to(DEVICE))
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and step % STEPS_PER_CHECKPOINT == 0:
                states = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
                save({**states, "training": loader_state(training)}, file)
        accuracy = validate(network, validation)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")


@torch.no_grad()
def validate(network: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the accuracy of all rows, each counted once, on every rank."""
    outputs = [(network(batch["image"].to(DEVICE)), batch["label"].to(DEVICE)) for batch in loader]
    scores, labels = map(torch.cat, zip(*gather_in_order(outputs, loader), strict=True))
    return float(multiclass_accuracy(scores, labels, num_classes=10, average="micro"))


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
