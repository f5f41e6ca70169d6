"""Samplers of other packages that balance lengths, at their most favourable settings, beside ``cost=``.

What a batch costs is its padded tokens: its longest sample times the number of its samples. ``balance.py`` makes a
table of these, and ``balance_training.py`` trains with them.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, TypeAlias

import numpy as np
from lhotse import CutSet
from lhotse.cut import MonoCut
from lhotse.dataset.sampling import DynamicBucketingSampler
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from ddp_patch import Cost, patch_dataloader_to_ddp
from ddp_patch.samplers import LengthBucketBatchSampler

__all__ = ["PEERS", "Peer"]

Lengths: TypeAlias = NDArray[np.int64]
Batches: TypeAlias = list[list[int]]
Steps: TypeAlias = Iterator[Batches]  # the batches of all ranks, step by step

ACCUMULATED = 16  # over how many steps BatchRebalanceSampler sorts at most, as if their gradients were accumulated
HUGGING_FACE, LHOTSE = f"transformers {version('transformers')}", f"lhotse {version('lhotse')}"


class ByTokens(BatchRebalanceSampler):  # type: ignore[misc]
    """Balances what is measured: by itself it also counts the square of the length, for attention."""

    QUADRATIC_COST_COEF = 0.0


class OfAllRanks(ByTokens):
    """Gives all ranks' batches, so that they are computed once."""

    def _yield_global_batch(self, batch_indices: list[int]) -> Iterator[Batches]:
        ranks = self._assign(batch_indices, [self.lengths[index] for index in batch_indices])
        for step in range(self.grad_accum):
            yield [rank[step] for rank in ranks]


class Picked(Dataset[Any]):
    """Gives a batch for a set of cuts, whose names are indices."""

    def __init__(self, data: Any, collate: Any) -> None:
        self.data, self.collate = data, collate

    def __getitem__(self, cuts: Any) -> Any:
        return self.collate([self.data[index] for index in named(cuts)])


def named(cuts: Any) -> list[int]:
    """Return the samples that cuts stand for."""
    return [int(cut.id) for cut in cuts]


@cache
def cuts_of(lengths: tuple[int, ...]) -> Any:
    """Return cuts that last as many seconds as samples have tokens."""
    cuts = (MonoCut(id=str(number), start=0, duration=float(n), channel=0) for number, n in enumerate(lengths))
    return CutSet.from_cuts(cuts).to_eager()


def budget(lengths: Lengths, size: int) -> int:
    """Return how many tokens make batches of about so many samples, and hold the longest sample."""
    return max(int(size * lengths.mean() / 0.95), int(lengths.max()))


@dataclass(frozen=True)
class Peer:
    """A way to divide samples among ranks.

    Attributes:
        name: For the table.
        of: Which package it is from.
        loader: Makes a rank's loader of data with these lengths, in batches of about so many samples.
        all_ranks: Gives all ranks' batches of each step, where a loader for each rank would take too long.
    """

    name: str
    of: str
    loader: Callable[[Any, Lengths, int, int, int, Any], Any]
    all_ranks: Callable[[Lengths, int, int], Steps] | None = None

    def steps(self, lengths: Lengths, size: int, ranks: int) -> list[Batches]:
        """Return all ranks' batches of each step.

        Raises:
            AssertionError: They are not what loaders of the ranks give.
        """
        own = [self.drawn(lengths, size, rank, ranks) for rank in range(ranks if self.all_ranks is None else 1)]
        if self.all_ranks is None:
            return [list(step) for step in zip(*own, strict=True)]
        found = list(self.all_ranks(lengths, size, ranks))
        if [step[0] for step in found] != own[0]:
            raise AssertionError(f"{self.name}, {ranks} ranks: all ranks' batches are not those of the first rank")
        return found

    def drawn(self, lengths: Lengths, size: int, rank: int, ranks: int) -> Batches:
        """Return a rank's batches."""
        return list(self.loader(range(len(lengths)), lengths, size, rank, ranks, list))


def shuffled(data: Any, lengths: Lengths, size: int, rank: int, ranks: int, collate: Any) -> Any:
    """Shuffled samples."""
    loader: DataLoader[Any] = DataLoader(data, size, shuffle=True, collate_fn=collate, drop_last=True)
    return patch_dataloader_to_ddp(loader, rank=rank, num_replicas=ranks, seed=0)


def grouped(data: Any, lengths: Lengths, size: int, rank: int, ranks: int, collate: Any) -> Any:
    """Whole batches in turn, as in the Trainer; sorted over as many steps for any number of ranks."""
    sampler = LengthGroupedSampler(size * ranks, lengths=lengths.tolist())
    loader: DataLoader[Any] = DataLoader(data, size, sampler=sampler, collate_fn=collate, drop_last=True)
    return patch_dataloader_to_ddp(loader, rank=rank, num_replicas=ranks, seed=0, share="batches", uneven="drop")


def rebalancing(most: int) -> Peer:
    """Return BatchRebalanceSampler, which sorts the samples of so many steps, or of a quarter of the epoch."""

    def made(kind: Any, lengths: Lengths, size: int, rank: int, ranks: int) -> Any:
        accumulated = max(1, min(most, len(lengths) // (4 * size * ranks)))
        return kind(
            lengths.tolist(), size * ranks * accumulated, ranks, accumulated, rank=rank, seed=0, drop_last=False
        )

    def loader(data: Any, lengths: Lengths, size: int, rank: int, ranks: int, collate: Any) -> Any:
        return DataLoader(data, batch_sampler=made(ByTokens, lengths, size, rank, ranks), collate_fn=collate)

    def all_ranks(lengths: Lengths, size: int, ranks: int) -> Steps:
        return iter(made(OfAllRanks, lengths, size, 0, ranks))

    name = "`BatchRebalanceSampler`" + (f", up to {most} steps at a time" if most > 1 else "")
    return Peer(name, HUGGING_FACE, loader, all_ranks)


def bucketing(lengths: Lengths, size: int, rank: int, ranks: int) -> Any:
    """Return lhotse's sampler: all samples at hand, many buckets, ranks in the same one, and steps that are whole."""
    logging.getLogger().setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples in memory are as good here as those that are read
        return DynamicBucketingSampler(
            cuts_of(tuple(lengths.tolist())),
            max_duration=float(budget(lengths, size)),
            num_buckets=max(10, len(lengths) // 200),  # more of them leave out more samples
            num_cuts_for_bins_estimate=len(lengths),
            buffer_size=len(lengths),
            shuffle=True,
            drop_last=True,
            sync_buckets=True,
            rank=rank,
            world_size=ranks,
        )


def bucketed(data: Any, lengths: Lengths, size: int, rank: int, ranks: int, collate: Any) -> Any:
    """A loader with lhotse's sampler."""
    return DataLoader(Picked(data, collate), batch_size=None, sampler=bucketing(lengths, size, rank, ranks))


def bucketed_on_all(lengths: Lengths, size: int, ranks: int) -> Steps:
    """Each rank draws the batches of all, and keeps its own: this keeps all."""
    sampler, drawn = bucketing(lengths, size, 0, ranks), list[list[int]]()
    draw = sampler._next_batch

    def next_batch() -> Any:
        batch = draw()
        drawn.append(named(batch))
        return batch

    sampler._next_batch = next_batch
    for _ in sampler:
        yield drawn[-ranks:]


def balanced(data: Any, lengths: Lengths, size: int, rank: int, ranks: int, collate: Any) -> Any:
    """Shuffled samples, balanced."""
    loader: DataLoader[Any] = DataLoader(data, size, shuffle=True, collate_fn=collate, drop_last=True)
    return patch_dataloader_to_ddp(loader, rank=rank, num_replicas=ranks, seed=0, cost=Cost(lengths, of="padded"))


def balanced_batches(data: Any, lengths: Lengths, size: int, rank: int, ranks: int, collate: Any) -> Any:
    """Batches by tokens, balanced."""
    most = 0.02 if len(lengths) > 10_000 else 0.1  # of few samples, few are as alike
    batches = LengthBucketBatchSampler(lengths, max_tokens=budget(lengths, size), max_padding=most, seed=0)
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    options: Any = {"cost": Cost(lengths, of="padded"), "share": "batches", "uneven": "drop"}
    return patch_dataloader_to_ddp(loader, rank=rank, num_replicas=ranks, seed=0, **options)


OURS = "ddp_patch"
PEERS: Sequence[Peer] = [
    Peer("`shuffle=True`", "torch", shuffled),
    Peer("`LengthGroupedSampler`", HUGGING_FACE, grouped),
    rebalancing(1),
    rebalancing(ACCUMULATED),
    Peer("`DynamicBucketingSampler`", LHOTSE, bucketed, bucketed_on_all),
    Peer('`shuffle=True`, `of="padded"`', OURS, balanced),
    Peer('`LengthBucketBatchSampler`, `of="padded"`', OURS, balanced_batches),
]
