"""``cost=``: steps cost alike on all ranks, each item comes once, and all else goes on as without it."""

import math
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
from costed import costed
from messages import raises
from resumed import as_saved
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from trying import over_in_turn
from zoo import (
    ALL_KINDS,
    STEPS,
    Indices,
    Kind,
    N,
    Source,
    as_it_is,
    comparable,
    loader,
    seed_ambient,
    seeded_generator,
    units,
)

from ddp_patch import Cost, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import InvalidOptionError, StateError
from ddp_patch.positions_and_padding import Plan

pytestmark = pytest.mark.filterwarnings("ignore::ddp_patch.errors.StreamLengthWarning")  # some kinds have it


def cost_of(key: Any) -> float:
    """A cost of any sample, by the value of its key."""
    is_typed = isinstance(key, tuple) and isinstance(key[0], type)  # as ``comparable`` has it
    return zlib.crc32(repr(key[1] if is_typed else key).encode()) % 101


def is_one_shot(kind: Kind) -> bool:
    """An iterator or an iterable dataset, which is refused."""
    return kind.epochs == 1 or "count" in kind.name or isinstance(kind.make().dataset, IterableDataset)


DEALT = [kind for kind in ALL_KINDS if not is_one_shot(kind)]


def of(n: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    """A loader of n indices."""
    return DataLoader(Indices(n), batch_size, collate_fn=as_it_is, **options)


def balanced(given: Any, world_size: int = 2, rank: int = 0, **options: Any) -> Any:
    chosen = costed({"seed": 3, "cost": cost_of, "window": 2} | options)
    return patch_dataloader_to_ddp(given, rank=rank, num_replicas=world_size, **chosen)


def epochs_of(kind: Kind, world_size: int, rank: int, **options: Any) -> list[list[Any]]:
    seed_ambient(1000 * world_size + rank)
    one = balanced(kind.make(), world_size, rank, **options)
    return [units(kind, one) for _ in range(kind.tried)]


def size_of(kind: Kind) -> int:
    """How many items of the stream a batch takes."""
    given = kind.make()
    return 1 if kind.batches or given.batch_sampler is None else getattr(given.batch_sampler, "batch_size", 1)


def windows(items: list[Any], world_size: int, size: int, steps: int = 2) -> list[list[Any]]:
    width = steps * world_size * size
    return [items[start : start + width] for start in range(0, len(items), width)]


@over_in_turn(
    [kind for kind in DEALT if "drop_last" not in kind.name],
    "ranks",
    [{"world_size": 2}, {"world_size": 3}, *({"world_size": 3, "uneven": uneven} for uneven in ("drop", "keep"))],
    suits=lambda kind, ranks: (
        ranks.get("uneven") != "drop" or "item" not in kind.name
    ),  # so few that no rank makes a step
)
def test_every_window_is_dealt_anew_and_shared_as_always(kind: Kind, ranks: dict[str, Any]) -> None:
    world_size, uneven = ranks["world_size"], ranks.get("uneven", "pad")
    size, alone = size_of(kind), epochs_of(kind, 1, 0, window=1)
    assert alone == epochs_of(kind, 1, 0, cost=None)  # one process has its own order
    by_rank = [epochs_of(kind, world_size, rank, uneven=uneven) for rank in range(world_size)]
    for epoch, stream in enumerate(alone):
        shares = [of_rank[epoch] for of_rank in by_rank]
        dealt = [shares[place % world_size][place // world_size] for place in range(sum(map(len, shares)))]
        if kind.endless:
            told = windows(dealt, world_size, size)[: STEPS // 2]
            assert len(told) == STEPS // 2
            del dealt[2 * world_size * size * len(told) :]
            several = epochs_of_endless(kind, world_size * STEPS * size)
            assert_windows(dealt, several[epoch][: len(dealt)], world_size, size, kind.batches)
            continue
        plan = Plan(0, world_size, uneven=uneven)
        assert len(dealt) == plan.total(len(stream))
        real = dealt[: len(stream)]
        assert dealt[len(stream) :] == [real[place % len(real)] for place in range(len(dealt) - len(real))]
        assert_windows(real, stream[: len(real)], world_size, size, kind.batches)


def epochs_of_endless(kind: Kind, items: int) -> list[list[Any]]:
    """What one process takes of each epoch, that far."""
    seed_ambient(1000)
    one = balanced(kind.make(), 1)
    return [units(kind, one, items) for _ in range(kind.tried)]


def assert_windows(dealt: list[Any], stream: list[Any], world_size: int, size: int, are_batches: bool) -> None:
    both = zip(windows(dealt, world_size, size), windows(stream, world_size, size), strict=True)
    for ours, theirs in both:
        assert Counter(map(repr, ours)) == Counter(map(repr, theirs))
        whole = len(ours) // (world_size * size) * world_size * size
        costs = Cost(cost_of).of(ours, are_batches=are_batches)
        if size == 1:  # each step has what lies side by side in order
            steps = sorted((each.min(), each.max()) for each in costs[:whole].reshape(-1, world_size))
            assert all(before[1] <= after[0] for before, after in pairwise(steps))
        elif whole:
            sums = costs[:whole].reshape(-1, size, world_size).sum(1)
            assert sums.max() - sums.min() <= costs.max()


@over_in_turn([kind for kind in DEALT if not kind.endless], "world_size", (2, 3))
def test_a_pass_resumes_anywhere(kind: Kind, world_size: int) -> None:
    """In the same world, all that follows is the same."""
    rank = 3 - world_size

    def start() -> Any:
        seed_ambient(world_size + rank)
        return balanced(kind.make(), world_size, rank)

    whole = start()
    epochs = [[comparable_batch(batch) for batch in whole] for _ in range(3)]
    for stop in range(1, len(epochs[1]), 1 if whole.num_workers == 0 else 3):
        running = start()
        list(running)
        iterator = iter(running)
        list(islice(iterator, stop))
        again = start()
        restore_loader(again, as_saved(loader_state(running, batches_done=stop)))
        assert [[comparable_batch(batch) for batch in again] for _ in range(2)] == [epochs[1][stop:], epochs[2]]
        del iterator


def comparable_batch(batch: Any) -> Any:
    return [comparable(item) for item in batch] if isinstance(batch, list) else comparable(batch)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("worlds", [(2, 3), (3, 1, 2), (4, 2, 4), (1, 5, 5)])
def test_in_other_worlds_each_sample_comes_once(worlds: tuple[int, ...], whole: bool) -> None:
    n, seen, state = 50, Counter[int](), None

    def make() -> DataLoader[Any]:
        return of(n, 2, sampler=RandomSampler(range(n)))

    for number, world_size in enumerate(worlds):
        is_last = number == len(worlds) - 1
        ranks = []
        for rank in range(world_size):
            seed_ambient(rank)
            one = balanced(make(), world_size, rank, uneven="keep", share="batches" if whole else "samples")
            if state is not None:
                restore_loader(one, state)
            batches = list(islice(one, None if is_last else 2 + number))
            ranks.append((one, batches))
            seen.update(chain.from_iterable(batches))
        assert is_last or len({str(loader_state(one, batches_done=len(batches))) for one, batches in ranks}) == 1
        state = as_saved(loader_state(ranks[0][0], batches_done=len(ranks[0][1]))) if not is_last else None
    assert seen == Counter(range(n))


def test_in_another_world_single_items_of_a_generator_that_the_loader_shares_come_once() -> None:
    """The loader draws a number from it for each iterator, before its sampler draws."""
    n = 9

    def start(rank: int, ranks: int) -> Any:
        return balanced(
            DataLoader(Indices(n), batch_size=None, shuffle=True, generator=seeded_generator()), ranks, rank
        )

    begun = [start(rank, 2) for rank in range(2)]
    given = [next(iter(each)) for each in begun]
    rest = start(0, 1)
    restore_loader(rest, loader_state(begun[0]))
    assert sorted([*given, *rest]) == [*range(n)]


@pytest.mark.parametrize("options", [{"cost": [2.0] * N}, {"window": 3}, {"cost": None}, {"of": "padded"}])
def test_the_state_of_another_balance_is_refused(options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"cost": [1.0] * N}
    running = balanced(loader(), **given)
    iterator = iter(running)
    next(iterator)
    with raises(StateError, "cost"):
        restore_loader(balanced(loader(), **given | options), loader_state(running))
    with raises(StateError, "batch_size"):
        restore_loader(balanced(loader(3), **given), loader_state(running))


@pytest.mark.parametrize(("cost_of", "most"), [("sum", 1.02), ("padded", 1.25)])
def test_the_batches_of_a_step_are_composed_by_what_they_cost(cost_of: Any, most: float) -> None:
    lengths = np.random.default_rng(0).lognormal(3, 1, 4096)

    def waits(**options: Any) -> float:
        ranks = []
        for rank in range(4):
            given = of(4096, 8, sampler=RandomSampler(range(4096)))
            one = patch_dataloader_to_ddp(given, seed=3, rank=rank, num_replicas=4, **options)
            batches = [lengths[batch] for batch in one]
            ranks.append([each.sum() if cost_of == "sum" else each.max() * len(each) for each in batches])
        costs = np.array(ranks)
        return float(costs.max(0).sum() / costs.mean(0).sum())

    assert waits(cost=Cost(lengths, of=cost_of, window=64)) < most < waits()


class Counted(Sampler[int]):
    """Counts what is drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.drawn += 1
            yield self.drawn


def test_a_window_and_no_more_is_drawn_before_the_first_batch() -> None:
    sampler = Counted()
    one = balanced(loader(2, sampler=sampler), 3, window=5)
    iterator = iter(one)
    next(iterator)
    assert one.sampler.sampler.drawn == 5 * 3 * 2


def test_each_window_has_an_order_of_its_own() -> None:
    """Costs rise by step, so that each window has the same steps to put in order."""
    one = balanced(of(256, 1), cost=[number // 2 % 32 for number in range(256)], window=32)
    windows = np.array([*one]).reshape(4, 32) // 2 % 32
    assert len({str(window) for window in windows}) == 4
    for window in windows:
        assert sorted(window) == [*range(32)]


def test_a_function_may_take_keys_that_are_no_indices() -> None:
    lengths = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    one = balanced(of(4, 1, sampler=[*lengths]), cost=lengths.get)
    assert len(list(one)) == 2
    pairs = BatchSampler(range(N), 2, drop_last=False)
    unbatched = DataLoader(Indices(), batch_size=None, sampler=pairs)  # as Hugging Face has it
    assert len(list(balanced(unbatched, cost=float))) == 6


# What is refused.


@pytest.mark.parametrize(
    ("given", "options", "facts", "remedy"),
    [
        (loader, {"cost": [1.0] * 3}, ("3 numbers", f"{N} samples"), "each index"),
        (loader, {"cost": [1.0] * (N - 1) + [-1.0]}, ("-1.0", str(N - 1)), ()),
        (loader, {"cost": {0: 1.0}}, "dict", "sequence"),
        (loader, {"cost": np.ones((N, 2))}, f"({N}, 2)", ()),
        (loader, {"cost": [[1], [1, 2]]}, "read as numbers", ()),
        (loader, {"cost": {1.0, 2.0}}, "set", "sequence"),
        (loader, {"cost": True}, "bool", ()),
        (loader, {"window": 0}, "window=0", ()),
        (loader, {"of": "max"}, "of='max'", "'padded'"),
        (loader, {"share": "within_batches"}, ("cost=", "share='within_batches'"), "share='samples'"),
        (lambda: DataLoader(Source(9), 2), {}, "Source", "__getitem__"),
        (lambda: loader(2, sampler=iter(range(9))), {}, "iterator", "list"),
    ],
)
def test_what_cannot_hold_is_refused(given: Any, options: dict[str, Any], facts: Any, remedy: Any) -> None:
    with raises(InvalidOptionError, facts, remedy):
        balanced(given(), **options)


@pytest.mark.parametrize(
    ("sampler", "cost", "facts"),
    [
        ([1, 2, N], [1.0] * N, (f"{N} numbers", "beyond")),
        ([(1, 2), (3, 4)], [1.0] * N, "(1, 2)"),
        ([1, 2], lambda index: math.nan if index == 2 else 1.0, "nan"),
        ([1, 2], lambda index: None if index == 2 else 1.0, "NoneType"),
    ],
)
def test_what_has_no_cost_is_named_when_it_comes(sampler: Any, cost: Any, facts: Any) -> None:
    one = balanced(of(2 if callable(cost) else N, 1, sampler=sampler), cost=cost)
    with raises(InvalidOptionError, facts):
        list(one)
