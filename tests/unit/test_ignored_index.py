"""A map-style dataset that takes what comes next, whatever its index: told at the patch and by the audit."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from messages import raises
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from ddp_patch import audit, patch_dataloader_to_ddp
from ddp_patch.errors import UnsupportedLoaderError

N = 12


class Clips(IterableDataset[int]):
    def __init__(self, sampler: Any = None) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(range(N) if self.sampler is None else self.sampler)


class Limited(Dataset[int]):
    """As pytorchvideo's example: an epoch with a known number of steps."""

    def __init__(self, stream: Any, iterator: Any = None) -> None:
        self.stream, self.iterator = stream, iterator

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if self.iterator is None:
            self.iterator = iter(self.stream)
        return next(self.iterator)


class Keyed(Limited):
    def __getitem__(self, index: int) -> Any:
        return next(itertools.islice(self.stream, index, None))


class InClosure(Limited):
    def __getitem__(self, index: int) -> Any:
        return max(one for one in self.stream if one <= index)


class Random(Dataset[int]):
    """Makes samples up, and holds no stream."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return 4


def patched(dataset: Any) -> Any:
    return patch_dataloader_to_ddp(DataLoader(dataset, 4), rank=0, num_replicas=2)


@pytest.mark.parametrize("nest", [lambda data: data, lambda data: Subset(data, range(8))])
def test_the_patch_refuses_it_and_names_the_remedy(nest: Any) -> None:
    facts = ("Limited.__getitem__ ignores its index", "a Clips (attribute 'stream')", "all ranks", "same items")
    dataset = Limited(Clips())
    with raises(UnsupportedLoaderError, facts, "DataLoader(dataset.stream, ...)"):
        patched(nest(dataset))
    assert [batch.tolist() for batch in patched(dataset.stream)] == [[0, 2, 4, 6], [8, 10]]


def test_an_iterator_alone_will_do() -> None:
    with raises(UnsupportedLoaderError, ("islice", "attribute 'iterator'"), "IterableDataset"):
        patched(Limited(None, itertools.islice(range(9), 9)))


@pytest.mark.parametrize("dataset", [Keyed(Clips()), InClosure(Clips()), Random(), range(N), Limited([1, 2])])
def test_what_reads_its_index_or_holds_no_stream_is_patched(dataset: Any) -> None:
    assert len(patched(dataset)) == 2


def test_a_stream_that_shards_itself_comes_back_as_it_is() -> None:
    given = DataLoader(Limited(Clips(DistributedSampler(Random(), 2, 0))), 4)
    assert patch_dataloader_to_ddp(given, rank=0, num_replicas=2) is given


def test_an_audit_refuses_it_whoever_patches() -> None:
    for patch in (True, False):
        with raises(UnsupportedLoaderError, ("ignores its index", "same items"), "DataLoader(dataset.stream, ...)"):
            audit(DataLoader(Limited(Clips()), 4), world_size=2, patch=patch)
    with raises(UnsupportedLoaderError, "ignores its index", "IterableDataset"):
        audit(lambda rank, world_size: DataLoader(Limited(iter(range(9))), 4), world_size=2)
