"""Train a classifier of handwritten digits on all ranks, then in one process, and show that both are the same.

Start it with ``torchrun --standalone --nproc-per-node 2 docs/examples/digits.py``.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import assert_loaders_patched, patch_dataloader_to_ddp
from ddp_patch.samplers import IterationBatchSampler, PKBatchSampler, WeightedClassSampler

Batch = tuple[Tensor, ...]  # images, labels, indices
Loaders = dict[str, DataLoader[Batch]]
Seen = dict[str, list[list[int]]]  # by loader: the indices in each batch

SEED, EPOCHS, BATCH_SIZE = 7, 5, 32
# DDP averages the ranks' mean losses, which is the mean over the union only where the ranks' batches are of one size.
# So with two ranks the sizes are even: 750 items per rank (the last batch has 14 on both) and 46 P x K batches.
TRAIN_SIZE, P, K, PK_BATCHES = 1500, 8, 4, 46
EVALUATION = "evaluation"
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Result:
    """What one process saw in the last epoch, and for each index of the evaluation data whether it was right."""

    seen: Seen
    right: dict[int, bool]


@dataclass(frozen=True)
class Shares:
    """What the ranks together saw of one loader in an epoch, against what one process sees."""

    items: list[int]
    steps: list[int]
    missing: int
    repeated: int
    padding: int


def make_loaders(batch_size: int) -> Loaders:
    """Three training loaders and one for evaluation, as they would be written for one process."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels, torch.arange(len(labels)))
    # TensorDataset(*data[a:b]) is the part with the indices still those of the whole.
    train, evaluation = TensorDataset(*data[:TRAIN_SIZE]), TensorDataset(*data[TRAIN_SIZE:])
    train_labels = labels[:TRAIN_SIZE]
    balanced = WeightedClassSampler.n_per_class(train_labels, TRAIN_SIZE // 10)
    pk_batches = IterationBatchSampler(PKBatchSampler(train_labels, P, K), PK_BATCHES)
    return {
        "shuffled": DataLoader(train, batch_size, shuffle=True),
        "class-balanced": DataLoader(train, batch_size, sampler=balanced),
        "P x K batches": DataLoader(train, batch_sampler=pk_batches),
        EVALUATION: DataLoader(evaluation, batch_size),
    }


def joined(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    """Yield every ``count`` consecutive batches as one."""
    iterator = iter(batches)
    while group := list(islice(iterator, count)):
        yield tuple(torch.cat(column) for column in zip(*group, strict=True))


def train(model: nn.Module, loaders: Loaders, pk_batches_per_step: int, title: str, progress: Progress) -> Result:
    """Train on every training loader in every epoch, then evaluate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = {name: loader for name, loader in loaders.items() if name != EVALUATION}
    seen: Seen = {}
    for _ in progress.track(range(EPOCHS), description=title):
        for name, loader in training.items():
            batches_per_step = 1 if loader.batch_size else pk_batches_per_step
            seen[name] = [step(model, optimizer, batch) for batch in joined(loader, batches_per_step)]
    seen[EVALUATION], right = evaluate(model, loaders[EVALUATION])
    return Result(seen, right)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> list[int]:
    """Take one training step; return the batch's indices."""
    images, labels, indices = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    optimizer.step()
    return indices.tolist()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Batch]) -> tuple[list[list[int]], dict[int, bool]]:
    """Return the indices in each batch, and for each index whether the prediction is right."""
    batches: list[list[int]] = []
    right: dict[int, bool] = {}
    for images, labels, indices in loader:
        batches.append(indices.tolist())
        right |= zip(batches[-1], (model(images).argmax(dim=1) == labels).tolist(), strict=True)
    return batches, right


def compare(ranks: list[list[list[int]]], one_process: list[list[int]]) -> Shares:
    """Compare the ranks' batches of an epoch with those of one process, as multisets of indices."""
    items = [sum(map(len, batches)) for batches in ranks]
    stream = [index for batch in one_process for index in batch]
    padding = max(0, sum(items) - len(stream))
    seen = Counter(index for batches in ranks for batch in batches for index in batch)
    # Padding is the stream's first items once more; anything else that comes too often is repeated.
    missing = Counter(stream) - seen
    repeated = seen - Counter(stream + stream[:padding])
    return Shares(items, list(map(len, ranks)), missing.total(), repeated.total(), padding)


def table(shares: dict[str, Shares]) -> Table:
    """One row per loader."""
    made = Table("loader", title="The last epoch")
    for column in ("items/rank", "steps/rank", "missing", "repeated", "padding"):
        made.add_column(column, justify="right")
    for name, share in shares.items():
        lists = [", ".join(map(str, values)) for values in (share.items, share.steps)]
        made.add_row(name, *lists, str(share.missing), str(share.repeated), str(share.padding))
    return made


def report(ranks: list[Result], alone: Result, difference: float) -> bool:
    """Print how the ranks' training compares with that of one process; return whether both are the same."""
    shares = {name: compare([rank.seen[name] for rank in ranks], stream) for name, stream in alone.seen.items()}
    right = {index: is_right for rank in ranks for index, is_right in rank.right.items()}  # padding counts once
    console = Console()
    console.print(table(shares))
    accuracy, accuracy_alone = (sum(found.values()) / len(found) for found in (right, alone.right))
    console.print(f"Evaluation accuracy: {accuracy:.2%} on the ranks, {accuracy_alone:.2%} in one process.")
    console.print(f"Largest difference between the weights: {difference:.1e} (allowed: {TOLERANCE:.0e}).")
    return difference < TOLERANCE and not any(share.missing or share.repeated for share in shares.values())


def train_alone(model: nn.Module, world_size: int, progress: Progress) -> Result:
    """Train in one process: its step k takes the samples that step k of all ranks takes together."""
    loaders = {
        name: patch_dataloader_to_ddp(loader, seed=SEED, rank=0, num_replicas=1)
        for name, loader in make_loaders(BATCH_SIZE * world_size).items()
    }
    return train(model, loaders, world_size, "1 process", progress)


def main() -> None:
    """Train on all ranks, then on rank 0 alone, and compare."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)  # every rank differently: the patched loaders agree all the same
    shares = {name: patch_dataloader_to_ddp(loader, seed=SEED) for name, loader in make_loaders(BATCH_SIZE).items()}
    assert_loaders_patched(shares)
    mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(mlp)  # sends rank 0's weights to all
    initial = copy.deepcopy(mlp)  # what one process starts from

    with Progress(disable=rank != 0) as progress:
        mine = train(model, shares, 1, f"{world_size} ranks", progress)
        everyone = [mine] * world_size
        dist.all_gather_object(everyone, mine)
        alone = train_alone(initial, world_size, progress) if rank == 0 else None
    one, two = (nn.utils.parameters_to_vector(trained.parameters()) for trained in (mlp, initial))
    same = alone is None or report(everyone, alone, (one - two).abs().max().item())
    # Nobody may end right after a collective: gloo's threads abort if they free its tensors while Python shuts down.
    dist.monitored_barrier()
    if not same:
        raise SystemExit("The ranks did not train what one process trains.")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
