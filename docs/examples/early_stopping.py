"""Stop when the validation loss no longer falls: on all ranks after the same epoch, wherever the job was killed before.

Start it with ``torchrun --standalone --nproc-per-node 2 docs/examples/early_stopping.py $(mktemp -d)``. In a folder
that has a checkpoint it goes on.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import iter_with_mask, loader_state, patch_dataloader_to_ddp, restore_loader

EPOCHS, PATIENCE, STEPS_PER_CHECKPOINT = 100, 3, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a loader for training and one for validation, as for one process."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(101, 32, generator=drawn)
    y = x[:, :1] + torch.randn(101, 1, generator=drawn)  # of which little can be learnt
    training, validation = TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])
    return DataLoader(training, batch_size=4, shuffle=True), DataLoader(validation, batch_size=16)


def main(folder: Path) -> None:
    """Train from the checkpoint on, or from the beginning."""
    file = folder / "checkpoint.pt"
    checkpoint = torch.load(file, map_location=DEVICE, weights_only=True) if file.exists() else None
    torch.manual_seed(0)
    training, validation = patch_dataloader_to_ddp(make_loaders())
    network = nn.Linear(32, 1).to(DEVICE)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    first_epoch, best, epochs_without_gain = 0, float("inf"), 0
    if checkpoint:
        network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        restore_loader(training, checkpoint["training"])
        first_epoch = checkpoint["training"]["epoch"]
        best, epochs_without_gain = checkpoint["patience"]

    for epoch in range(first_epoch, EPOCHS):
        for step, (x, y) in enumerate(training, start=1):
            optimizer.zero_grad()
            loss = mse_loss(model(x.to(DEVICE)), y.to(DEVICE))
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            optimizer.step()
            if dist.get_rank() == 0 and step % STEPS_PER_CHECKPOINT == 0:
                states = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
                patience = best, epochs_without_gain  # as before this epoch's validation
                save({**states, "training": loader_state(training), "patience": patience}, file)
        validated = validate(network, validation)
        best, epochs_without_gain = (validated, 0) if validated < best else (best, epochs_without_gain + 1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {validated:.4f}, epochs without gain {epochs_without_gain}")
        stop = torch.tensor(int(epochs_without_gain == PATIENCE), device=DEVICE)
        dist.all_reduce(stop, dist.ReduceOp.MAX)  # if one rank stops, all do
        if stop:
            break


@torch.no_grad()
def validate(network: nn.Module, loader: DataLoader[Any]) -> float:
    """Return the mean loss of all samples, each counted once, on every rank."""
    sums = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for (x, y), mask in iter_with_mask(loader):
        losses = mse_loss(network(x.to(DEVICE)), y.to(DEVICE), reduction="none")[:, 0]
        sums += torch.stack([losses[mask.to(DEVICE)].double().sum(), mask.sum().to(DEVICE)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


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
