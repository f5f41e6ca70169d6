"""A loader is looked at once: how often one patch hands it from room to room."""

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from quick import soaked
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from zoo import ALL_KINDS, Indices, Kind, Source

import ddp_patch
from ddp_patch import audit, patch_dataloader_to_ddp
from ddp_patch.loaders import copying
from ddp_patch.loaders.facts import ShardedUnit, StreamFacts, look_at

ROOT = Path(ddp_patch.__path__[0])


def room_of(frame: FrameType) -> str | None:
    """The room of the package that a function stands in, or None for anybody else's."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(ROOT).parts[0].removesuffix(".py") if path.is_relative_to(ROOT) else None


@contextmanager
def journey(of: object) -> Iterator[list[str]]:
    """Note each room that calls a function with ``of`` among its arguments, in turn."""
    rooms: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        room = room_of(frame)
        if event == "call" and room is not None:
            count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            if any(frame.f_locals.get(name) is of for name in frame.f_code.co_varnames[:count]):
                rooms.append(room)

    sys.setprofile(note)
    try:
        yield rooms
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    "kind", [*ALL_KINDS[::3], *map(soaked, ALL_KINDS[1::3] + ALL_KINDS[2::3])], ids=lambda kind: kind.name
)
def test_a_loader_enters_few_rooms_and_hardly_returns_to_one(kind: Kind) -> None:
    loader = kind.make()
    with journey(loader) as rooms:
        patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
    entered = [room for room, _ in groupby(rooms)]
    assert entered[0] == "patching"
    assert len(entered) <= 10
    assert len(entered) - len(set(entered)) <= 4


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
    facts = look_at(loader)
    assert (facts.unit, type(facts.stream.source), facts.batch_size, facts.drop_last) == told
    assert facts.sharded_by is None
    with pytest.raises(AttributeError):
        facts.unit = ShardedUnit.SAMPLE  # type: ignore[misc]  # it is frozen


@pytest.mark.parametrize(("workers", "ahead"), [(0, 0), (2, 4)])
def test_it_tells_how_many_batches_workers_fetch_ahead(workers: int, ahead: int) -> None:
    loader: DataLoader[Any] = DataLoader(Indices(10), num_workers=workers)
    facts = look_at(loader)
    assert (facts.num_workers, facts.batches_ahead) == (workers, ahead)


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


def test_what_has_no_length_is_told_to_have_none() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 0

    facts = look_at(DataLoader(Endless()))
    assert facts.dataset_length is None
    assert facts.described["dataset length"] == "unknown"


@pytest.mark.parametrize(("loader", "told"), LOOKS)
def test_it_tells_what_the_loader_iterates(loader: DataLoader[Any], told: Told) -> None:
    facts = look_at(loader)
    assert facts.iterated is (loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    assert facts.samplers[0] is facts.iterated
    if told[0] is not ShardedUnit.ITERABLE:
        assert facts.samplers[-len(facts.stream.samplers) :] == facts.stream.samplers


def test_a_pickled_look_is_one_at_the_pickled_loader() -> None:
    facts = look_at(DataLoader(Indices(10), 4, shuffle=True))
    again = pickle.loads(pickle.dumps(facts))  # noqa: S301 - pickled just now
    assert again.stream.source is again.loader.sampler is not facts.loader.sampler
    assert again.described == facts.described


@pytest.mark.parametrize("patch", [True, False])
@pytest.mark.parametrize(("loader", "told"), LOOKS)
def test_an_audit_looks_at_no_loader_twice(
    loader: DataLoader[Any], told: object, patch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[DataLoader[Any]] = []
    repeater_in = copying.repeater_in

    def noted(one: DataLoader[Any]) -> object:
        seen.append(one)
        return repeater_in(one)

    monkeypatch.setattr("ddp_patch.loaders.facts.repeater_in", noted)
    audit(loader, 2, epochs=3, patch=patch)
    assert len(seen) == len(set(map(id, seen))) > 3
