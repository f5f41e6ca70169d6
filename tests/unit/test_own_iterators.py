"""Samplers that are their own iterators: some begin anew at every iter(), as lhotse's do; others give items once."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from resumed import BeginsAnew
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch import DDPSamplerWrapper, audit
from ddp_patch.errors import ExhaustedSamplerError, StateError
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.orders.chunks import start_iterating

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
    assert StreamFacts.of(sampler).is_one_shot is expected
    assert len(list(start_iterating(sampler))) == len(list(start_iterating(make())))


@pytest.mark.parametrize("make", [BeginsAnew, OfUnknownRandomness, Once], ids=lambda make: make.__name__)
@pytest.mark.parametrize("uneven", ["pad", "drop", "keep"])
def test_one_epoch_is_shared_once(make: Callable[[], Any], uneven: Any) -> None:
    ranks = [DDPSamplerWrapper(make(), False, uneven=uneven, rank=rank, num_replicas=3) for rank in range(3)]
    shares = [list(rank) for rank in ranks]
    assert list(map(len, shares)) == [N // 3] * 3
    if make is not OfUnknownRandomness:
        assert {index for share in shares for index in share} == set(range(N))


def test_every_epoch_is_what_one_process_draws() -> None:
    plain = BeginsAnew()
    ranks = [DDPSamplerWrapper(BeginsAnew(), False, rank=rank, num_replicas=2) for rank in range(2)]
    for epoch in range(3):
        plain.set_epoch(epoch)
        first, second = map(list, ranks)
        assert [index for pair in zip(first, second, strict=True) for index in pair] == list(plain)


@pytest.mark.parametrize("make", [generated, Once, BegunLazily], ids=lambda make: make.__name__)
def test_what_gives_its_items_once_still_does(make: Callable[[], Any]) -> None:
    sampler = DDPSamplerWrapper(make(), False, rank=0, num_replicas=2)
    assert next(iter(sampler)) == 0
    assert list(sampler)[:2] == [2, 4]
    with pytest.raises(ExhaustedSamplerError):
        list(sampler)
    with pytest.raises(StateError, match="once"):
        sampler.state_dict()


class Stream(BeginsAnew, IterableDataset[int]):
    """A dataset that is its own iterator, and begins anew."""

    def __init__(self) -> None:
        BeginsAnew.__init__(self, 20, shuffle=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_audit_reads_a_dataset_that_begins_anew_to_its_end(workers: int) -> None:
    report = audit(DataLoader(Stream(), 4, num_workers=workers), 2)
    assert report.problems == ()
