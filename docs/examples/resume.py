"""Train on any number of ranks and, killed at any moment, go on from the newest checkpoint with as many as there are.

Start it with ``torchrun --standalone --nproc-per-node 2 --max-restarts 3 docs/examples/resume.py FOLDER``; kill ranks,
and start it again with another number of them. Files in the folder tell which samples each rank took at each step. With
torch 2.13, ranks restarted by ``torchrun`` meet only if the environment has ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader

SEED, EPOCHS, BATCH_SIZE, STEPS_PER_CHECKPOINT = 7, 12, 2, 3
LABELS, SAMPLES_PER_LABEL, P, K = 4, 34, 2, 2


class PKBatchSampler(Sampler[list[int]]):
    """Batches of ``P`` labels with ``K`` samples each, in which every sample comes once an epoch."""

    def __len__(self) -> int:
        return LABELS * SAMPLES_PER_LABEL // (P * K)

    def __iter__(self) -> Iterator[list[int]]:
        # Sample i has the label i % LABELS.
        of_labels = [torch.randperm(SAMPLES_PER_LABEL) * LABELS + label for label in range(LABELS)]
        for start in range(0, SAMPLES_PER_LABEL, K):
            for labels in torch.randperm(LABELS).view(-1, P).tolist():
                yield [index for label in labels for index in of_labels[label][start : start + K].tolist()]


def make_loader(kind: str) -> DataLoader[Any]:
    """A loader as it would be written for one process."""
    indices = torch.arange(LABELS * SAMPLES_PER_LABEL)
    images = torch.randn(len(indices), 8, generator=torch.Generator().manual_seed(SEED))
    data = TensorDataset(images, indices % LABELS, indices)
    if kind == "P x K":
        return DataLoader(data, batch_sampler=PKBatchSampler())
    return DataLoader(data, BATCH_SIZE, shuffle=True)


def main(folder: Path, kind: str) -> None:
    """Train from the newest checkpoint on, or from the beginning."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    file = folder / "checkpoint.pt"
    # Every rank reads it before the patch, where all meet: so no rank can have written the next one yet.
    checkpoint = torch.load(file, weights_only=True) if file.exists() else None
    steps: int = checkpoint["steps"] if checkpoint else 0
    if rank == 0:
        append(folder / "starts", {"world": world_size, "steps": steps})

    torch.manual_seed(SEED)
    network = nn.Linear(8, LABELS)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    loader = patch_dataloader_to_ddp(make_loader(kind), seed=SEED)
    first_epoch = 0
    if checkpoint:
        network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        restore_loader(loader, checkpoint["loader"])
        first_epoch = checkpoint["loader"]["epoch"]

    model = DistributedDataParallel(network)
    for epoch in range(first_epoch, EPOCHS):
        for images, labels, indices in loader:
            # Before the step, in which ranks meet: what a checkpoint says is done is in every rank's log.
            taken = {"steps": steps, "epoch": epoch, "world": world_size, "indices": indices.tolist()}
            append(folder / f"taken-{rank}", taken)
            train(model, optimizer, images, labels)
            steps += 1
            if rank == 0 and steps % STEPS_PER_CHECKPOINT == 0:
                checkpoint = {
                    "steps": steps,
                    "network": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader_state(loader),
                }
                save(checkpoint, file)
    if rank == 0:
        save(network.state_dict(), folder / "trained.pt")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """Take one training step."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    optimizer.step()


def save(what: dict[str, Any], file: Path) -> None:
    """Write a file of which, whenever this process is killed, either the old or the new one is there."""
    new = file.with_suffix(".new")
    torch.save(what, new)
    os.replace(new, file)


def append(file: Path, what: dict[str, Any]) -> None:
    """Add a line that outlives this process."""
    with file.open("a") as log:
        log.write(json.dumps(what) + "\n")
        log.flush()
        os.fsync(log.fileno())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "shuffled")
        # Nobody may end right after a collective: gloo's threads abort if they free its tensors as Python shuts down.
        dist.monitored_barrier()
    finally:
        dist.destroy_process_group()
