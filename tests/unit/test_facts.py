"""What one look at a loader tells, and with which arguments it was made."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from zoo import NEWER, Indices, Source, loader

from ddp_patch import extract_loader_parameters
from ddp_patch.loaders.facts import ShardedUnit, StreamFacts, look_at


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


class Counting:
    """Counts how often its length is asked for, which moves the global generators."""

    asked = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))

    def __len__(self) -> int:
        self.asked += 1
        return 7 + round(random.random()) * 0


def test_a_length_is_asked_for_once_and_only_where_it_is_needed() -> None:
    sampler = Counting()
    stream = StreamFacts.of(sampler)
    assert sampler.asked == 0
    before = random.getstate(), torch.get_rng_state()
    assert [stream.length, stream.length, stream.described["sampler length"]] == [7, 7, 7]
    assert sampler.asked == 1
    assert before[0] == random.getstate()
    assert bool((before[1] == torch.get_rng_state()).all())


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
