"""Train a classifier of handwritten digits in one process and on 2, 3 and 4 ranks, and compare the parameters.

``python docs/examples/digits.py`` starts the ranks itself; those of one training are killed, and others go on.
"""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler, get_worker_info

from ddp_patch import iter_with_weights, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import RanksFailedError
from ddp_patch.samplers import PKBatchSampler
from ddp_patch.testing import run_ranks

Share: TypeAlias = Literal["within_batches", "samples", "batches"]
Trained: TypeAlias = dict[str, dict[str, Tensor]]  # by way and loader: all parameters

SEED, EPOCHS = 7, 3
# The last batch has 11 samples, and no number of ranks divides a batch of P x K = 25.
SAMPLES, BATCH_SIZE, P, K, PK_BATCHES = 203, 16, 5, 5, 11
WORLDS, KILLED_WORLD, KILLED_EPOCH, KILLED_STEP = (2, 3, 4), 3, 1, 5
TOLERANCE = 1e-10

SHARES: tuple[Share, ...] = ("within_batches", "samples", "batches")
RESUMED, PLAIN = "killed and resumed", "without weights"  # both within batches
BATCHES_ALONE = {"1 to 9 samples", "P x K"}  # have batch samplers of their own, which make no samples to share
SAMPLES_ALONE = {"iterable, two workers"}  # whose workers read samples


class UnequalBatches(Sampler[list[int]]):
    """Batches of 1 to 9 samples, drawn anew in each epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        while order:
            size = int(torch.randint(1, 10, ()))
            yield order[:size]
            order = order[size:]


class Joined(Sampler[list[int]]):
    """Every ``count`` consecutive batches as one: what so many ranks take in a step."""

    def __init__(self, batch_sampler: Iterable[list[int]], count: int) -> None:
        self.batch_sampler, self.count = batch_sampler, count

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.batch_sampler)
        while group := list(islice(batches, self.count)):
            yield list(chain.from_iterable(group))


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """The samples in order, of which each worker reads its part."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        info = get_worker_info()
        places = range(info.id, SAMPLES, info.num_workers) if info else range(SAMPLES)
        return (self.data[place] for place in places)


def make_loaders(wider: int = 1) -> dict[str, DataLoader[Any]]:
    """Five loaders, as they are written for one process; or with so many times larger batches."""
    images, labels = (torch.from_numpy(array[:SAMPLES]) for array in load_digits(return_X_y=True))
    data = TensorDataset(images / 16, labels)
    pk_batches = PKBatchSampler(labels, P, K, num_batches=PK_BATCHES)
    unequal, pk = (Joined(given, wider) if wider > 1 else given for given in (UnequalBatches(), pk_batches))
    size = BATCH_SIZE * wider
    return {
        "shuffled": DataLoader(data, size, shuffle=True),
        "weighted": DataLoader(data, size, sampler=WeightedRandomSampler((1 + labels).tolist(), SAMPLES)),
        "1 to 9 samples": DataLoader(data, batch_sampler=unequal),
        "P x K": DataLoader(data, batch_sampler=pk),
        "iterable, two workers": DataLoader(Stream(data), size, num_workers=2, persistent_workers=True),
    }


def make_network() -> nn.Module:
    """Return the same network in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Return what trains it: slowly, since a learning rate that makes it diverge makes roundings grow."""
    return torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)


class Training:
    """A model that is trained on a patched loader."""

    def __init__(self, loader: DataLoader[Any], weighted: bool = True) -> None:
        self.loader, self.weighted, self.epoch = loader, weighted, 0
        self.network = make_network()
        self.model = DistributedDataParallel(self.network) if dist.is_initialized() else self.network
        self.optimizer = make_optimizer(self.network)

    def steps(self) -> Iterator[int]:
        """Train; tell after each step how many of its epoch are done."""
        for epoch in range(self.epoch, EPOCHS):
            self.epoch = epoch
            for done, ((images, labels), weights) in enumerate(self.batches(), start=1):
                self.optimizer.zero_grad()
                losses = nn.functional.cross_entropy(self.model(images), labels, reduction="none")
                loss = losses.mean() if weights is None else (losses * weights).sum()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
                self.optimizer.step()
                yield done

    def batches(self) -> Iterator[tuple[Any, Tensor | None]]:
        """Yield an epoch's batches, with weights where they are wanted."""
        if self.weighted:
            return iter_with_weights(self.loader, dtype=torch.float64)
        return ((batch, None) for batch in self.loader)

    def finish(self) -> Tensor:
        """Train to the end and return all parameters."""
        for _ in self.steps():
            pass
        return nn.utils.parameters_to_vector(self.network.parameters()).detach()

    def save(self, file: Path, batches_done: int) -> None:
        """Write a checkpoint."""
        loader = loader_state(self.loader, batches_done=batches_done)
        torch.save(
            {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict(), "loader": loader}, file
        )

    def load(self, file: Path) -> None:
        """Go on from a checkpoint, whatever number of ranks wrote it."""
        checkpoint = torch.load(file, weights_only=True)
        self.network.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        restore_loader(self.loader, checkpoint["loader"])
        self.epoch = checkpoint["loader"]["epoch"]


def patched(share: Share) -> dict[str, DataLoader[Any]]:
    """Patch the loaders that can be shared so, on a rank that is seeded differently from the others."""
    torch.manual_seed(dist.get_rank())
    leave_out = {"within_batches": set(), "samples": BATCHES_ALONE, "batches": SAMPLES_ALONE}[share]
    loaders = {name: loader for name, loader in make_loaders().items() if name not in leave_out}
    return {name: patch_dataloader_to_ddp(loader, share=share, seed=SEED) for name, loader in loaders.items()}


def train_on_ranks(rank: int, world_size: int, folder: Path) -> Trained:
    """Train in every way."""
    trained: Trained = {
        share: {name: Training(loader).finish() for name, loader in patched(share).items()} for share in SHARES
    }
    trained[RESUMED] = {}
    for name, loader in patched("within_batches").items():
        training = Training(loader)
        training.load(folder / name)
        trained[RESUMED][name] = training.finish()
    divided = patched("within_batches")
    trained[PLAIN] = {name: Training(loader, weighted=False).finish() for name, loader in divided.items()}
    return trained


def die_in_an_epoch(rank: int, world_size: int, folder: Path) -> None:
    """Train with each loader up to the midst of an epoch, save, and be killed."""
    unfinished = []
    for name, loader in patched("within_batches").items():
        training = Training(loader)
        steps = training.steps()
        while (next(steps), training.epoch) != (KILLED_STEP, KILLED_EPOCH):
            pass
        unfinished.append(steps)
        if rank == 0:
            training.save(folder / name, KILLED_STEP)
    dist.monitored_barrier()  # all have come so far
    os.kill(os.getpid(), signal.SIGKILL)


def train_alone(wider: int) -> dict[str, Tensor]:
    """Train in one process, by the mean loss of each batch."""
    loaders = make_loaders(wider).items()
    shares = {name: patch_dataloader_to_ddp(loader, seed=SEED, rank=0, num_replicas=1) for name, loader in loaders}
    return {name: Training(loader, weighted=False).finish() for name, loader in shares.items()}


def differences() -> dict[str, dict[str, list[float]]]:
    """Return, by way and loader and for each number of ranks, the largest difference of any parameter of any rank."""
    imported_once = ["ddp_patch.testing", "rich.table", "sklearn.datasets", "torch._dynamo", "torch.nn.parallel"]
    multiprocessing.set_forkserver_preload(imported_once)  # for all ranks
    found: dict[str, dict[str, list[float]]] = {}
    same_batch = train_alone(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run_ranks(die_in_an_epoch, KILLED_WORLD, folder)
        except RanksFailedError as error:
            if "killed by SIGKILL" not in str(error):
                raise
        else:
            raise AssertionError("no rank was killed")
        for world_size in WORLDS:
            larger_batch = train_alone(world_size)
            for trained in run_ranks(train_on_ranks, world_size, folder):
                for way, by_loader in trained.items():
                    alone = larger_batch if way in {"samples", "batches"} else same_batch
                    for loader, parameters in by_loader.items():
                        difference = (parameters - alone[loader]).abs().max().item()
                        found.setdefault(way, {}).setdefault(loader, []).append(difference)
    return found


def main() -> None:
    """Compare, and print a table."""
    found = differences()
    worlds = ", ".join(map(str, WORLDS))
    table = Table("loader", title=f"Largest difference of any parameter to one process, on {worlds} ranks")
    for way in found:
        table.add_column(way, justify="right")
    for loader in make_loaders():
        table.add_row(loader, *(f"{max(way[loader]):.1e}" if loader in way else "-" for way in found.values()))
    Console(width=110).print(table)
    wrong = [way for way, by_loader in found.items() if way != PLAIN and max(chain(*by_loader.values())) >= TOLERANCE]
    if wrong:
        raise SystemExit(f"These ranks did not train what one process trains: {', '.join(wrong)}.")
    if min(chain(*found[PLAIN].values())) <= 1e-6:
        raise SystemExit("Ranks trained the same without weights, so this does not show what they are for.")


if __name__ == "__main__":
    main()
