"""Orders that are looked up: the streams of torch's samplers, each rank only its part, and how that grows with n."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from messages import raises
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from zoo import Indices, as_it_is

from ddp_patch import DDPBatchSamplerWrapper, DDPSamplerWrapper, patch_dataloader_to_ddp
from ddp_patch.errors import StreamLengthError
from ddp_patch.orders.chunks import MOST_AHEAD
from ddp_patch.orders.orders import has_order, order_of
from ddp_patch.positions_and_padding import Plan

WORDS = [f"{index}.jpg" for index in range(103)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


# Each maker gives a sampler anew, with a generator of its own or the global one.
SAMPLERS: dict[str, Callable[[torch.Generator | None], Sampler[Any]]] = {
    "sequential": lambda _: SequentialSampler(range(103)),
    "random": lambda g: RandomSampler(range(103), generator=g),
    "random, one": lambda g: RandomSampler(range(1), generator=g),
    "random, fewer samples": lambda g: RandomSampler(range(103), num_samples=10, generator=g),
    "random, more samples": lambda g: RandomSampler(range(10), num_samples=103, generator=g),
    "random, twice as many": lambda g: RandomSampler(range(50), num_samples=100, generator=g),
    "with replacement": lambda g: RandomSampler(range(103), replacement=True, generator=g),
    "with replacement, more": lambda g: RandomSampler(range(10), replacement=True, num_samples=103, generator=g),
    "with replacement, of many": lambda g: RandomSampler(range(2**40), True, num_samples=103, generator=g),
    "with replacement, large": lambda g: RandomSampler(range(10), replacement=True, num_samples=100_003, generator=g),
    "random, large": lambda g: RandomSampler(range(100_003), generator=g),
    "subset": lambda g: SubsetRandomSampler(range(50, 103), generator=g),
    "subset of words": lambda g: SubsetRandomSampler(WORDS, generator=g),  # type: ignore[arg-type]
    "subset, a tensor": lambda g: SubsetRandomSampler(torch.arange(50, 103), generator=g),  # type: ignore[arg-type]
    "subset of nothing": lambda g: SubsetRandomSampler([], generator=g),
    "weighted": lambda g: WeightedRandomSampler(torch.arange(1.0, 50.0), 103, generator=g),  # type: ignore[arg-type]
    "weighted, without": lambda g: WeightedRandomSampler([1.0, 2.0, 3.0], 3, replacement=False, generator=g),
}


# torch draws these piece by piece, so with the user's generator they are iterated.
ITERATED = {name for name in SAMPLERS if "replacement" in name or name.endswith(("more samples", "twice as many"))}


def test_a_given_generator_is_not_drawn_far_ahead() -> None:
    assert {name for name, make in SAMPLERS.items() if not has_order(make(generator()))} == ITERATED
    assert all(has_order(make(None)) for make in SAMPLERS.values())


@pytest.mark.parametrize(
    ("name", "has_generator"),
    [*product(SAMPLERS, [False]), *((name, True) for name in SAMPLERS if name not in ITERATED)],
)
def test_the_order_of_torchs_samplers_is_the_one_that_they_draw(name: str, has_generator: bool) -> None:
    theirs, ours = (generator() if has_generator else None for _ in range(2))
    for epoch in range(2):
        torch.manual_seed(epoch)
        expected = list(SAMPLERS[name](theirs))
        ambient = torch.get_rng_state()
        torch.manual_seed(epoch)
        order = order_of(SAMPLERS[name](ours), epoch)
        items = list(order.at(range(order.length)))
        order.finish()
        assert items == expected
        assert [type(item) for item in items] == [type(item) for item in expected]
        assert order.length == len(expected)
        assert list(order.at(range(1, order.length, 3))) == expected[1::3]
        assert torch.equal(torch.get_rng_state(), ambient)
        if theirs is not None and ours is not None:
            assert torch.equal(theirs.get_state(), ours.get_state())


def test_a_huge_number_of_samples_begins_at_once() -> None:
    for sampler in (RandomSampler(range(9), True, num_samples=10**12), RandomSampler(range(9), num_samples=10**11)):
        wrapper = DDPSamplerWrapper(sampler, False, num_replicas=3, rank=1)
        assert next(iter(wrapper)) in range(9)


class Subclass(RandomSampler):
    """Might have any order."""


def test_only_exactly_torchs_samplers_and_random_access_have_an_order() -> None:
    assert not has_order(Subclass(range(3)))
    assert not has_order(BatchSampler(range(3), 1, drop_last=False))
    assert not has_order(range(3))
    assert not has_order(LookedUp)  # a class is no sampler
    assert has_order(LookedUp(3))
    assert not has_order(OnlyIterated(3))
    assert not has_order(Reversed(3))
    assert not has_order(Delegating(LookedUp(3)))
    assert not has_order(OfSomethingElse(3))


class LookedUp:
    """Notes what it is asked for."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.asked = 0
        self.epochs: set[int] = set()

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("nobody needs all of it")

    def items_at(self, positions: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        self.asked += len(positions)
        self.epochs.add(epoch)
        assert positions.min() >= 0
        assert positions.max() < self.n
        return self.n - 1 - positions


class OnlyIterated(LookedUp):
    """One that has no random access, of a class that has."""

    has_random_access = False


class Reversed(LookedUp):
    """Iterates in an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Delegating:
    """Has an order of its own around another sampler, whose attributes it hands out."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OfSomethingElse(LookedUp):
    def items_at(self, time: float) -> list[int]:  # type: ignore[override]  # that it is another method is the point
        return []


class TooFew(LookedUp):
    def items_at(self, positions: npt.NDArray[np.int64], epoch: int) -> Any:
        return deque(positions.tolist()[1:])


def test_random_access_that_gives_too_few_items_is_refused() -> None:
    wrapper = DDPSamplerWrapper(TooFew(10), False, num_replicas=2, rank=0)
    with raises(StreamLengthError, ("TooFew.items_at()", "4 items", "5 positions"), "one item"):
        list(wrapper)


@pytest.mark.parametrize("n", [10, 10**9, 2**63 - 1])
@pytest.mark.parametrize("world_size", [1, 7, 100_003])
def test_a_sampler_with_random_access_is_asked_for_its_share_alone(n: int, world_size: int) -> None:
    sampler = LookedUp(n)
    for rank in (0, world_size // 2, world_size - 1):
        options: Any = {"num_replicas": world_size, "rank": rank}
        wrapper = DDPSamplerWrapper(sampler, False, **options)
        wrapper.set_epoch(3)
        share = Plan(rank, world_size).share(n)
        sampler.asked = 0
        for position, item in zip(share[:100], wrapper, strict=False):
            assert item == n - 1 - position % n
        padding = len(Plan(rank, world_size).padding(n))  # is looked up first
        assert sampler.asked <= padding + 64 + 128
        assert len(wrapper) == len(share)
    assert sampler.epochs == {3}


def test_a_position_is_reached_without_asking_for_those_before() -> None:
    sampler = LookedUp(10**9)
    wrapper = DDPSamplerWrapper(sampler, False, num_replicas=4, rank=1)
    wrapper.load_state_dict(wrapper.state_dict() | {"epoch": 2, "taken": [4 * (10**8)]})
    assert next(iter(wrapper)) == 10**9 - 1 - (4 * 10**8 + 1)
    assert sampler.asked == 64


# What does not depend on the machine: how much is drawn, held and swapped.


@pytest.mark.parametrize("is_batch", [True, False])
@pytest.mark.parametrize("fails_at", [0, 1, 5, 6, 300, 301, 302])
def test_whole_rounds_come_before_an_exception(fails_at: int, is_batch: bool) -> None:
    def stream() -> Iterator[Any]:
        for index in range(fails_at):
            yield [index] if is_batch else index
        raise RuntimeError("the user's own")

    class Failing(Sampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return stream()

    for rank in range(3):
        given: list[Any] = []
        wrapper = DDPBatchSamplerWrapper(Failing(), False, num_replicas=3, rank=rank)
        with pytest.raises(RuntimeError, match="the user's own"):
            given.extend(wrapper)
        assert given == [[index] if is_batch else index for index in range(rank, fails_at - fails_at % 3, 3)]


def test_batches_that_are_iterators_over_one_source_are_all_read() -> None:
    class Lazy(Sampler[Iterator[int]]):
        def __iter__(self) -> Iterator[Iterator[int]]:
            source = iter(range(3000))
            for _ in range(1000):
                yield islice(source, 3)

    for rank in range(2):
        wrapper: Any = DDPBatchSamplerWrapper(Lazy(), False, num_replicas=2, rank=rank, seed=0)
        assert list(wrapper) == [[start, start + 1, start + 2] for start in range(3 * rank, 3000, 6)]


def test_an_order_is_held_in_32_bits_and_once() -> None:
    order = order_of(RandomSampler(range(1_000_000)), epoch=0)
    look_up: Any = order.at
    (tensor,) = look_up.args
    assert tensor.untyped_storage().nbytes() == 4_000_000


# How cost grows with n and the number of ranks, counted: what a rank draws, asks for and holds ahead.

RANKS = [1, 16, 1024, 16_384]
SIZES = [10**6, 10**9, 10**12]
BATCH = 64


def share_of(sampler: Any, world_size: int, **options: Any) -> DDPSamplerWrapper[Any]:
    return DDPSamplerWrapper(sampler, False, rank=world_size - 1, num_replicas=world_size, seed=0, **options)


class Source(Sampler[int]):
    """Any sampler: notes how much of it was drawn."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.drawn = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):
            self.drawn += 1
            yield index


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("n", SIZES)
def test_any_sampler_is_drawn_a_bounded_way_ahead(n: int, world_size: int) -> None:
    sampler = Source(n)
    wrapper = share_of(sampler, world_size)
    sampler.drawn = 0
    first = list(islice(iter(wrapper), BATCH))
    needed = min(n, world_size * BATCH)
    assert first == [position % n for position in Plan(world_size - 1, world_size).share(n)[:BATCH]]
    assert sampler.drawn <= needed + max(MOST_AHEAD, world_size)
    assert sampler.drawn <= 2 * needed


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("n", SIZES)
def test_a_sequential_sampler_is_not_drawn_at_all(n: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(sampler: Any) -> Any:
        raise AssertionError("its positions are its items")

    wrapper = share_of(SequentialSampler(range(n)), world_size)
    monkeypatch.setattr(SequentialSampler, "__iter__", drawn)
    assert list(islice(iter(wrapper), 3)) == list(range(world_size - 1, n, world_size)[:3])


def test_torchs_order_is_drawn_once_an_epoch_whatever_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    original = torch.randperm

    def counted(n: int, **options: Any) -> torch.Tensor:
        drawn.append(n)
        return original(n, **options)

    monkeypatch.setattr(torch, "randperm", counted)
    for world_size in RANKS:
        given: DataLoader[Any] = DataLoader(Indices(10_000), BATCH, shuffle=True, collate_fn=as_it_is)
        patched = patch_dataloader_to_ddp(given, rank=0, num_replicas=world_size)
        drawn.clear()
        list(patched)
        assert drawn == [10_000]
