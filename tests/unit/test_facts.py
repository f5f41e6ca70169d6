"""What one look at a loader tells: what is shared, what was given, what gives its items once or ignores its index."""

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing
from resumed import BeginsAnew
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from zoo import NEWER, Indices, Source, loader

from ddp_patch import DDPSamplerWrapper, audit, extract_loader_parameters, patch_dataloader_to_ddp
from ddp_patch.errors import ExhaustedSamplerError, StateError
from ddp_patch.loaders.facts import ShardedUnit, StreamFacts, look_at
from ddp_patch.orders.chunks import start_iterating


def over(batch_sampler: Any) -> DataLoader[Any]:
    return DataLoader(Indices(10), batch_sampler=batch_sampler)


class OwnBatches(BatchSampler):
    pass


# What the look says of each way to build a loader: level, class of the stream's source, batch_size, drop_last.
Told = tuple[ShardedUnit, type, int | None, bool]
LOOKS: list[tuple[DataLoader[Any], Told]] = [
    (DataLoader(Indices(10), 4), (ShardedUnit.SAMPLE, SequentialSampler, 4, False)),
    (DataLoader(Indices(10), 4, shuffle=True, drop_last=True), (ShardedUnit.SAMPLE, RandomSampler, 4, True)),
    (over(BatchSampler(SequentialSampler(range(10)), 3, True)), (ShardedUnit.SAMPLE, SequentialSampler, 3, True)),
    (over(OwnBatches(SequentialSampler(range(10)), 3, True)), (ShardedUnit.BATCH, OwnBatches, None, False)),
    (over([[0, 1], [2]]), (ShardedUnit.BATCH, list, None, False)),
    (DataLoader(Indices(10), batch_size=None), (ShardedUnit.UNBATCHED, SequentialSampler, None, False)),
    (DataLoader(Source(), 4, drop_last=True), (ShardedUnit.ITERABLE, Source, 4, True)),
    (DataLoader(Source(), batch_size=None), (ShardedUnit.ITERABLE, Source, None, False)),
]


@pytest.mark.parametrize(("loader", "told"), LOOKS)
def test_one_look_tells_what_is_sharded(loader: DataLoader[Any], told: Told) -> None:
    look = look_at(loader)
    assert (look.unit, type(look.stream.source), look.batch_size, look.drop_last) == told
    assert look.sharded_by is None
    assert look.iterated is (loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    assert look.samplers[0] is look.iterated
    if told[0] is not ShardedUnit.ITERABLE:
        assert look.samplers[-len(look.stream.samplers) :] == look.stream.samplers
    with pytest.raises(AttributeError):
        look.unit = ShardedUnit.SAMPLE  # type: ignore[misc]  # it is frozen


# What a loader was made with.


def test_every_argument_that_a_stock_loader_still_knows() -> None:
    context = torch.multiprocessing.get_context("spawn")
    given = DataLoader(Indices(), 5, num_workers=1, multiprocessing_context=context, prefetch_factor=3, **NEWER)
    parameters = extract_loader_parameters(given)
    assert parameters["multiprocessing_context"] is context
    assert (parameters["batch_size"], parameters["prefetch_factor"]) == (5, 3)
    assert NEWER.items() <= parameters.items()
    assert "shuffle" not in parameters
    assert all(getattr(given, name) is value for name, value in parameters.items())


def test_what_is_not_about_data_builds_another_loader() -> None:
    parameters = extract_loader_parameters(loader(num_workers=1), ignore_data_related_parameters=True)
    assert not parameters.keys() & {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    other = DataLoader(Indices(3), batch_size=2, **parameters)
    assert extract_loader_parameters(other, ignore_data_related_parameters=True) == parameters


class Newer(DataLoader[Any]):
    """A later torch's loader: one more argument, handing the rest on."""

    def __init__(self, *args: Any, transport: str = "pipe", forgotten: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transport = transport


class Narrow(DataLoader[Any]):
    """A subclass that takes nothing else."""

    def __init__(self, name: str) -> None:
        super().__init__(Indices())
        self.name = name


def test_arguments_that_a_subclass_adds_come_along() -> None:
    parameters = extract_loader_parameters(Newer(Indices(), transport="queue"))
    assert parameters["transport"] == "queue"
    assert parameters["timeout"] == 0
    assert "forgotten" not in parameters


def test_a_subclass_that_hands_nothing_on_has_its_own_arguments_only() -> None:
    assert extract_loader_parameters(Narrow("x")) == {"name": "x"}


# Samplers that are their own iterators: some begin anew at every iter(); others give items once.

N = 300


class Once:
    """An iterator as Python wants it: iter() changes nothing."""

    def __init__(self, n: int = N) -> None:
        self.left = list(range(n))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class BegunLazily(Once):
    """It begins at the first iter(), and goes on at every other."""

    def __init__(self) -> None:
        self.left: Any = None

    def __iter__(self) -> Iterator[int]:
        self.left = list(range(N)) if self.left is None else self.left
        return self


class OfUnknownRandomness(BeginsAnew):
    """It begins anew, in an order that nobody can tell."""

    def __iter__(self) -> Iterator[int]:
        super().__iter__()
        random.SystemRandom().shuffle(self.left)
        return self


class Keyed(BeginsAnew):
    """Its items are of a class of the user's."""

    def __next__(self) -> Any:
        return Key(super().__next__())


class Key:
    def __init__(self, key: int) -> None:
        self.key = key


def generated() -> Iterator[int]:
    yield from range(N)


ONE_SHOT: dict[str, tuple[Callable[[], Any], bool]] = {
    "begins anew": (BeginsAnew, False),
    "begins anew, in order": (lambda: BeginsAnew(shuffle=False), False),
    "begins anew, few items": (lambda: BeginsAnew(3), False),
    "begins anew, items of a class": (Keyed, False),
    "no iterator": (lambda: range(N), False),
    "a generator": (generated, True),
    "a list's iterator": (lambda: iter(range(N)), True),
    "an iterator of a class": (Once, True),
    "begun lazily": (BegunLazily, True),
    "nothing to give": (lambda: Once(0), True),
    "another order at each iter()": (OfUnknownRandomness, True),
}


@pytest.mark.parametrize(("make", "expected"), ONE_SHOT.values(), ids=ONE_SHOT)
def test_what_gives_its_items_once_is_told_and_nothing_is_used_up(make: Callable[[], Any], expected: bool) -> None:
    sampler = make()
    assert StreamFacts(sampler).is_one_shot is expected
    assert len(list(start_iterating(sampler))) == len(list(start_iterating(make())))


@pytest.mark.parametrize("make", [generated, Once, BegunLazily], ids=lambda make: make.__name__)
def test_what_gives_its_items_once_still_does(make: Callable[[], Any]) -> None:
    sampler = DDPSamplerWrapper(make(), False, rank=0, num_replicas=2)
    assert next(iter(sampler)) == 0
    assert list(sampler)[:2] == [2, 4]
    with pytest.raises(ExhaustedSamplerError):
        list(sampler)
    with pytest.raises(StateError, match="once"):
        sampler.state_dict()


# A map-style dataset that may take what comes next, whatever its index.

FEW = 12


class Clips(IterableDataset[int]):
    def __init__(self, sampler: Any = None) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(range(FEW) if self.sampler is None else self.sampler)


class Limited(Dataset[int]):
    """As pytorchvideo's example: an epoch with a known number of steps."""

    def __init__(self, stream: Any, iterator: Any = None) -> None:
        self.stream, self.iterator = stream, iterator

    def __len__(self) -> int:
        return FEW

    def __getitem__(self, index: int) -> Any:
        if self.iterator is None:
            self.iterator = iter(self.stream)
        return next(self.iterator)


class ByIndex(Limited):
    def __getitem__(self, index: int) -> Any:
        return next(itertools.islice(self.stream, index, None))


class Random(Dataset[int]):
    """Makes samples up, and holds no stream."""

    def __len__(self) -> int:
        return FEW

    def __getitem__(self, index: int) -> int:
        return 4


def patched(dataset: Any) -> Any:
    return patch_dataloader_to_ddp(DataLoader(dataset, 4), rank=0, num_replicas=2)


class Drawing(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in self.batch_sampler or ():
            yield torch.tensor([self.dataset[place] for place in batch])


class After(DataLoader[Any]):
    def __iter__(self) -> Any:
        assert len(self.dataset)  # type: ignore[arg-type]  # as above
        yield from super().__iter__()


class HandedOn(DataLoader[Any]):
    def __iter__(self) -> Any:
        return batches_of(len(self.dataset), self)  # type: ignore[arg-type]  # as above


def batches_of(_n: int, loader: Any) -> Iterator[Any]:
    yield from DataLoader.__iter__(loader)


@pytest.mark.parametrize("kind", [Drawing, After, HandedOn])
def test_a_loader_that_draws_from_its_samplers_or_may_do_so_is_patched(kind: Any) -> None:
    loader = patch_dataloader_to_ddp(kind(range(FEW), 4), rank=1, num_replicas=2)
    assert [batch.tolist() for batch in loader] == [[1, 3, 5, 7], [9, 11]]


# A loader of a user's own, which reads its dataset without its samplers; and how a script goes on after the patch.
PAST_SAMPLERS = """
import sys
from torch.utils.data import DataLoader
from ddp_patch import patch_dataloader_to_ddp
class Fast(DataLoader):
    def __iter__(self):
        {reads}
loader = patch_dataloader_to_ddp(Fast(range(8), 4), rank=0, num_replicas=2)
for _ in loader:
    pass
"""


@pytest.mark.parametrize(
    ("reads", "is_told"), [("yield from self.dataset", True), ("yield from super().__iter__()", False)]
)
def test_a_loader_that_reads_past_its_samplers_is_told_when_the_process_exits(reads: str, is_told: bool) -> None:
    command = [sys.executable, "-c", PAST_SAMPLERS.format(reads=reads)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - our own script
    told = "UnpatchedLoaderWarning: Fast, patched at <string>:8, has drawn no index until this process exits"
    assert (told in ended.stderr) == is_told
    assert ended.stderr == "" or is_told


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (Limited(Clips()), "Limited holds a Clips (attribute 'stream')"),
        (Subset(Limited(Clips()), range(8)), "Limited holds a Clips (attribute 'stream')"),
        (Limited(None, itertools.islice(range(9), 9)), "Limited holds a islice (attribute 'iterator')"),
        (ByIndex(Clips()), "ByIndex holds a Clips (attribute 'stream')"),
        (Random(), ""),
        (range(FEW), ""),
    ],
)
def test_what_may_ignore_its_index_is_patched_and_an_audit_says_so(dataset: Any, told: str) -> None:
    """Ranks compare what it gives: ``tests/ranks/test_users_differ_ranks.py``."""
    assert len(patched(dataset)) == -(-len(dataset) // 8)
    how = audit(DataLoader(dataset, 4), world_size=2).how
    assert told in how
    assert ("indices may not name samples" in how) == bool(told)


def test_a_stream_that_shards_itself_comes_back_as_it_is() -> None:
    given = DataLoader(Limited(Clips(DistributedSampler(Random(), 2, 0))), 4)
    assert patch_dataloader_to_ddp(given, rank=0, num_replicas=2) is given
