"""Broken set-ups, and right ones that other libraries make, for the audit to look at: each a factory."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    get_worker_info,
)

from ddp_patch import DDPSamplerWrapper
from ddp_patch.samplers import PKBatchSampler

N = 103
LABELS = [i % 5 for i in range(N)]


class Untouchable(Dataset[Any]):
    """A dataset whose samples nobody may read."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("an audit reads no sample")


class Nth(Sampler[Any]):
    """A naive share: every world_size-th item of a stream, with options for what may go wrong."""

    def __init__(self, source: Any, rank: int, world_size: int, length: int | None = None) -> None:
        self.source, self.rank, self.world_size, self.length = source, rank, world_size, length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.source), self.rank, None, self.world_size)


class Chunks(Sampler[list[int]]):
    """Batches of one size of whatever indices it is given, with no attribute that torch's batch sampler has."""

    def __init__(self, indices: Any, size: int) -> None:
        self.indices, self.size = indices, size

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.indices), self.size):
            yield list(self.indices[start : start + self.size])


class Torn(Sampler[list[int]]):
    """Gives each rank its part of every batch."""

    def __init__(self, batches: PKBatchSampler, rank: int, world_size: int) -> None:
        self.batches, self.rank, self.world_size = batches, rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[self.rank :: self.world_size] for batch in self.batches)


class WholeBatchPadding(Sampler[int]):
    """Fills every rank's last batch from the beginning."""

    def __init__(self, rank: int, world_size: int, batch_size: int) -> None:
        self.rank, self.world_size, self.batch_size = rank, world_size, batch_size

    def __iter__(self) -> Iterator[int]:
        round_size = self.world_size * self.batch_size
        total = -(-N // round_size) * round_size if self.world_size > 1 else N
        return (position % N for position in range(self.rank, total, self.world_size))


def loader(sampler: Any, n: int = N, **options: Any) -> DataLoader[Any]:
    return DataLoader(Untouchable(n), batch_size=4, sampler=sampler, **options)


def not_sharded(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(RandomSampler(Untouchable()))


def rank_zero_everywhere(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(DistributedSampler(Untouchable(), world_size, rank=0, shuffle=False))


def double_sharding(rank: int, world_size: int) -> DataLoader[Any]:
    """A dataset that is split by rank already."""
    part: Subset[Any] = Subset(Untouchable(), range(rank, N, world_size))
    return loader(DDPSamplerWrapper(range(len(part)), False, rank=rank, num_replicas=world_size))


def half_for_other_ranks(rank: int, world_size: int) -> DataLoader[Any]:
    """Half of the data are missing, which no last batches explain: workers of a map-style dataset make none."""
    ranks = 2 * world_size if world_size > 1 else 1
    sampler: Any = DistributedSampler(Untouchable(128), ranks, rank, shuffle=False)
    return DataLoader(Untouchable(128), 16, sampler=sampler, drop_last=True, num_workers=2)


def by_local_rank(rank: int, world_size: int) -> DataLoader[Any]:
    """On machines of two processes each."""
    return loader(Nth(range(N), rank % 2, world_size))


def own_draw(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(RandomSampler(Untouchable(), num_samples=N // world_size))


def ambient_order(rank: int, world_size: int) -> DataLoader[Any]:
    length = -(-N // world_size)
    return loader(islice_to(Nth(RandomSampler(Untouchable()), rank, world_size), length))


class islice_to(Sampler[int]):  # noqa: N801 - read like the function
    """A sampler's items, padded by the first to a length."""

    def __init__(self, sampler: Sampler[int], length: int) -> None:
        self.sampler, self.length = sampler, length

    def __iter__(self) -> Iterator[int]:
        items = list(self.sampler)
        yield from (items + items)[: self.length]


class PrivatelyShuffled(Sampler[int]):
    """Shuffles by a generator of its own, which nobody seeds."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(N - N % 4).tolist())


def private_order(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(Nth(PrivatelyShuffled(), rank, world_size))


def torchs(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(DistributedSampler(Untouchable(), num_replicas=world_size, rank=rank))


def torchs_dropping(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(DistributedSampler(Untouchable(), world_size, rank, shuffle=False, drop_last=True))


def torn(rank: int, world_size: int) -> DataLoader[Any]:
    batches = PKBatchSampler(LABELS, p=4, k=2, seed=1)
    return DataLoader(Untouchable(), batch_sampler=Torn(batches, rank, world_size))


def uneven(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(Nth(range(97), rank, world_size))  # 25, 24, 24, 24 of batch size 4: 7 steps on rank 0, else 6


def lost_tail(rank: int, world_size: int) -> DataLoader[Any]:
    whole = N if world_size == 1 else N - N % world_size
    return loader(Nth(range(whole), rank, world_size))


def wrong_length(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(Nth(range(100), rank, world_size, length=100))


def whole_batch_padding(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(WholeBatchPadding(rank, world_size, 4))


class ByTurns(Sampler[int]):
    """Has the same order in every second epoch."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(range(N) if self.passes % 2 else reversed(range(N)))


def by_turns(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(ByTurns())


class WithReplacement(Sampler[int]):
    """Draws samples for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(N, ()))


class Failing(Sampler[int]):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[int]:
        yield 0
        if self.fails:
            raise LookupError("the index file is gone")


def failing(rank: int, world_size: int) -> DataLoader[Any]:
    return loader(Failing(rank == 1))


class Stream(IterableDataset[int]):
    """Every ``step``-th of the first ``n`` numbers."""

    def __init__(self, start: int = 0, step: int = 1, n: int = N) -> None:
        self.start, self.step, self.n = start, step, n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.n, self.step))


class SplitByWorker(Stream):
    """Gives each worker its part, and knows nothing of ranks."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return islice(super().__iter__(), worker.id, None, worker.num_workers) if worker else super().__iter__()


def stream_split_by_rank_alone(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(Stream(rank, world_size, n=104), batch_size=4, num_workers=2)


def stream_read_by_every_worker(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=4, num_workers=2)


SHARDS = [[*range(5)], [*range(5, 12)], [*range(12, 16)], [*range(16, 22)]]  # of 22 samples, for 4 workers


class Shards(IterableDataset[int]):
    """One shard for each worker from the ``first`` on, told by its number; never read without a worker."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter(SHARDS[self.first + info.id])


def shards_of_fewer_workers(rank: int, world_size: int) -> DataLoader[Any]:
    """Four workers are divided among the ranks, and each numbers its own from 0."""
    return DataLoader(Shards(), 2, num_workers=4 // world_size)


class Augmented(Stream):
    """Makes its samples anew each time."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.rand(3) + item for item in super().__iter__())
