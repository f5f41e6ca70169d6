"""A sampler and a batch sampler of one's own, and what the ranks get of a loader."""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

SAMPLES = 26
GROUPS = [list(range(SAMPLES))[start : start + 4] for start in range(0, SAMPLES, 4)]  # samples that belong together

warnings.simplefilter("ignore")  # what libraries warn of, and log, is not what is shown here
logging.disable(logging.WARNING)


class Indices(Dataset[int]):
    """Each sample is its own index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class OwnSampler(Sampler[int]):
    """Every sample once, in a new order in each epoch."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


class OwnBatchSampler(Sampler[list[int]]):
    """Every group once, in a new order in each epoch."""

    batch_size, drop_last = 4, False

    def __len__(self) -> int:
        return len(GROUPS)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([GROUPS[place] for place in torch.randperm(len(GROUPS)).tolist()])


class UnequalBatchSampler(Sampler[list[int]]):
    """Batches of 1, 2, 3 and more samples."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        for size in range(1, SAMPLES):
            if batch := order[:size]:
                yield batch
            order = order[size:]


def show(title: str, make: Callable[[], DataLoader[int]], divided: bool = False) -> None:
    """Make a loader on every rank, go through two epochs, and print on rank 0 what all ranks got together.

    Args:
        title: Printed before it.
        make: Makes the loader.
        divided: Whether the ranks' batches of a step are parts of one batch.
    """
    epochs: list[list[list[int]]] = []
    error = ""
    try:
        loader = make()
        epochs = [[torch.as_tensor(batch).tolist() for batch in loader] for _ in range(2)]
    except Exception as caught:  # noqa: BLE001 - whatever a library raises is what becomes of the loader
        error = f"raises {type(caught).__name__}"
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, epochs)
    if dist.get_rank() == 0:
        print(f"{title + ':':<22} {error or judge(ranks, with_groups='batch' in title, divided=divided)}")
    # Nobody may end right after a collective: gloo's threads abort if they free its tensors while Python shuts down.
    dist.monitored_barrier()


def judge(ranks: list[list[list[list[int]]]], with_groups: bool, divided: bool) -> str:
    """Put into words what the ranks got in the first epoch, and whether the second one differs."""
    batches = [batch for first, _ in ranks for batch in first]
    if divided:
        batches = [list(chain(*parts)) for parts in zip_longest(*(first for first, _ in ranks), fillvalue=())]
    seen = Counter(index for batch in batches for index in batch)
    steps = "+".join(str(len(first)) for first, _ in ranks)
    split = f", {sum(sorted(set(batch)) not in GROUPS for batch in batches)} split" if with_groups else ""
    order = "same order" if all(first == second for first, second in ranks) else "new order"
    return f"{steps} steps, {len(seen)} of {SAMPLES} seen, {seen.total() - len(seen)} repeated{split}, {order}"
