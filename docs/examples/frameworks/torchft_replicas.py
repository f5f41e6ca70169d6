"""torchft: replicas are killed and come back, and each sample of an epoch comes once in the committed steps.

Start ``torchft_lighthouse --min_replicas 2`` once, and in the environment of each replica set ``TORCHFT_LIGHTHOUSE`` to
its address. Start each with a port of its own, as often as you like: ``torchrun --nproc-per-node 1 --master-port 29601
torchft_replicas.py FOLDER NAME``. On several nodes, add ``--master-addr $(hostname)``: the others need an address by
which they reach this replica. Files in the folder tell which samples each replica took at each step.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from ddp_patch.integrations.torchft import QuorumLoader

SAMPLES, EPOCHS, BATCH_SIZE, STEP_S = 240, 3, 6, 0.2


class Stream(IterableDataset[Any]):
    """The samples in order, of which each worker reads its part."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        info = get_worker_info()
        return map(self.data.__getitem__, range(info.id, SAMPLES, info.num_workers) if info else range(SAMPLES))


def make_loader(kind: str = "map-style", workers: int = 0) -> DataLoader[Any]:
    """A loader as it would be written for one process."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
    if kind == "stream":
        return DataLoader(Stream(data), BATCH_SIZE, num_workers=workers)
    return DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=workers)


def make_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model that begins the same on each replica, and what trains it."""
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)  # of the weights, too, to compare what is trained to the last digits
    network = torch.nn.Linear(8, 1)
    return network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)


def train(manager: Manager, shares: QuorumLoader[Any], network: Any, optimizer: Any, log: Any) -> None:
    """Train until the last epoch is done, whoever takes part."""
    while shares.epoch < EPOCHS:
        manager.start_quorum()
        (x, y, indices), weights = shares.next_batch()
        log(step := manager.current_step(), epoch=shares.epoch, indices=indices[weights > 0].tolist())
        time.sleep(STEP_S)  # stands for a larger model
        optimizer.zero_grad()
        losses = (network(x) - y).square().mean(1)
        (losses * weights).sum().backward()
        for parameter in network.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            optimizer.step()
            log(step, is_committed=True)


def main(folder: Path, name: str, loader: DataLoader[Any], *, is_async: bool = False, **options: Any) -> None:
    """Be one replica."""
    network, optimizer = make_model()
    group = ProcessGroupGloo(timedelta(seconds=10))
    manager = Manager(
        group, None, None, min_replica_size=2, use_async_quorum=is_async, init_sync=not is_async, replica_id=name
    )
    manager.register_state_dict_fn("network", network.load_state_dict, network.state_dict)
    manager.register_state_dict_fn("optimizer", optimizer.load_state_dict, optimizer.state_dict)
    shares = QuorumLoader(manager, loader, seed=7, **options)
    train(manager, shares, network, optimizer, logging_to(folder, name, manager))
    torch.save(network.state_dict(), folder / f"network-{name}.pt")
    manager.shutdown()


def logging_to(folder: Path, name: str, manager: Manager) -> Callable[..., None]:
    """Return what writes a line into this process' log, at once."""
    file = (folder / f"log-{name}-{os.getpid()}").open("a", buffering=1)

    def log(step: int, **line: Any) -> None:
        taking = {"step": step, "rank": manager.participating_rank(), "replicas": manager.num_participants()}
        file.write(json.dumps({**taking, **line, "at": time.time()}) + "\n")

    return log


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], make_loader())
