"""Which samples datasets hold, at the patch and in each pass: what ranks may rightly differ in is never told."""

import random
import tempfile
import tracemalloc
from array import array
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from messages import raises
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from zoo import Indices

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.contents import HeldData, chosen_samples
from ddp_patch.ranks.agreement import require_same_samples

N = 40
Make = Callable[[int], Any]


class Holding(Dataset[Any]):
    """A user's dataset that keeps things in memory. To ask it for a sample may cost, and differ by rank."""

    def __init__(self, n: Any = N, **held: Any) -> None:
        self.n = n
        vars(self).update(held)

    def __len__(self) -> int:
        return self.n  # type: ignore[no-any-return]  # of any type, for a test

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it was asked for a sample")


class Masked(Holding):
    """The samples behind a mask, as in active learning: it has another length than the mask."""

    mask: Any

    def __len__(self) -> int:
        return sum(bool(one) for one in self.mask)


@dataclass
class Sample:
    path: str


class Numbered:
    def __init__(self, number: int, **more: Any) -> None:
        self.number = number
        vars(self).update(more)


class Reads(list[int]):
    """Reads a file for each element."""

    def __getitem__(self, index: Any) -> Any:
        raise OSError("it reads a file")


class Iterated(IterableDataset[int]):
    def __init__(self, rank: int) -> None:
        self.data = [rank] * N

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(self.data)


Row = namedtuple("Row", "number")


def names(folder: str = "/data/", n: int = 2 * N) -> list[str]:
    return [f"{folder}{index}.jpg" for index in range(n)]


LABELS = [index // N for index in range(2 * N)]  # sorted by class, so that both halves look alike
X = torch.arange(2 * N * 3.0).reshape(2 * N, 3)


def part(data: Any) -> Make:
    """As one splits by hand: each of two ranks takes every second sample."""
    return lambda rank: data[rank::2]


def hold(**data: Any) -> Make:
    """A dataset for each rank, which holds its part of everything."""
    return lambda rank: Holding(**{name: value[rank::2] for name, value in data.items()})


def noise(rank: int, n: int = N) -> Any:
    return np.random.default_rng(rank).random(n)


def mapped(rank: int) -> Any:
    with tempfile.TemporaryFile() as file:
        found = np.memmap(file, dtype=np.int64, mode="w+", shape=(N,))
    found[:] = range(rank, 2 * N, 2)
    return Holding(rows=found)


# ---- at the patch ----

BY_HAND: dict[str, Make] = {
    "list": part(list(range(2 * N))),
    "list of paths": part(names()),
    "list of pairs": part([*zip(names(), LABELS, strict=True)]),
    "list in runs": lambda rank: [*range(rank * N, rank * N + N)],  # of which the first holds its own positions
    "tensor": part(X),
    "TensorDataset": lambda rank: TensorDataset(X[rank::2], X[rank::2, 0]),
    "Subset of a list": lambda rank: Subset(names()[rank::2], range(10)),  # type: ignore[arg-type]  # a list will do
    "ConcatDataset": lambda rank: ConcatDataset([TensorDataset(X[rank::2]), Indices()]),
    "a dataset of paths": hold(paths=names(), labels=LABELS),
    "a dataset of tensors": lambda rank: Holding(x=X[rank::2], y=X[rank::2, 0], mean=[0.5] * 2),
    "a list in another order": lambda rank: names()[:: -1 if rank else 1],
    "names in folders of their own": part([f"/data/{index}/image.png" for index in range(2 * N)]),
    "a dataset of objects": hold(samples=[*map(Numbered, range(2 * N))]),
    "an array": lambda rank: array("q", range(rank, 2 * N, 2)),
    "a file in memory": mapped,
    "a dict of another class": lambda rank: Holding(split=OrderedDict(train=names()[rank::2])),
    "an object": lambda rank: Holding(index=SimpleNamespace(files=names()[rank::2])),
    "two samples of each": lambda rank: Holding(n=2 * N, paths=names()[rank::2]),
}
ALIKE: dict[str, Make] = {
    "copies in folders of their own": lambda rank: names(f"/scratch/rank{rank}/", N),
    "the same in a dataset": lambda rank: Holding(paths=names(f"/scratch/rank{rank}/", N)),
    "NaN": lambda rank: [float("nan")] * N,
    "a cache that fills up": lambda rank: Holding(cache=[rank if place < N * rank else None for place in range(N)]),
    "noise beside the samples": lambda rank: Holding(paths=names(n=N), noise=noise(rank), seeds=[*noise(rank)]),
    "settings": lambda rank: Holding(size=[rank, rank], rank=rank, name=f"rank {rank}", n=3),
    "objects on devices of their own": lambda rank: [Numbered(place, device=f"cuda:{rank}") for place in range(N)],
    "what reads a file": lambda rank: Reads([rank] * N),
    "an iterable dataset": Iterated,
    "a dataset whose length raises": lambda rank: Holding(n="many", data=[rank] * N),
    "other classes on one rank only": lambda rank: Indices(N) if rank else names()[:N],
    **{
        f"any value: {value!r}": lambda rank, value=value: [value] * N  # type: ignore[misc]  # a default binds it
        for value in (Sample("a"), Row(1), {1}, slice(3), 1 + 2j, b"bytes", np.float32(1), True)
    },
}


def differ(datasets: Sequence[Any]) -> bool:
    try:
        require_same_samples({rank: chosen_samples(one) for rank, one in enumerate(datasets)})
    except RankMismatchError:
        return True
    return False


@pytest.mark.parametrize("kind", BY_HAND)
def test_data_that_was_split_by_hand_shows_and_the_same_data_do_not(kind: str) -> None:
    make = BY_HAND[kind]
    assert differ([make(0), make(1)])
    assert not differ([make(0), make(0)])


@pytest.mark.parametrize("kind", ALIKE)
def test_what_ranks_may_differ_in_is_no_alarm(kind: str) -> None:
    assert not differ([ALIKE[kind](0), ALIKE[kind](1)])


def test_the_error_names_what_differs_and_the_remedies() -> None:
    facts = ("Agreeing", "rank 0 and rank 1", "different samples", "Holding.paths", "lost")
    remedies = ("data[rank::world_size]", "random data", "is_ddp_aware = True")
    with raises(RankMismatchError, facts, remedies):
        require_same_samples({rank: chosen_samples(hold(paths=names(), labels=LABELS)(rank)) for rank in range(2)})


def test_a_look_copies_little() -> None:
    many = 10**7
    held = HeldData(Holding(many, files=["a"] * many, at=[*range(many)], mask=np.zeros(many, bool), y=torch.ones(many)))
    tracemalloc.start()
    held.begin()
    held.told()
    held.read()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < many  # bytes, of hundreds of millions that the data has


# ---- in passes: what each rank does to its data, and what is then told ----

Change = Callable[[Any, int], object]
n20 = [f"{number}.png" for number in range(20)]


def put(name: str, make: Make) -> Change:
    return lambda dataset, rank: setattr(dataset, name, make(rank))


def shuffle(name: str) -> Change:
    return lambda dataset, rank: random.Random(rank).shuffle(getattr(dataset, name))


def masked(kind: Callable[[list[bool]], Any]) -> Callable[[], Any]:
    return lambda: Masked(mask=kind([place < 6 for place in range(80)]))


def select(dataset: Any, rank: int) -> None:
    dataset.mask[40 + rank] = True


SUBSET = "the indices of a Subset"
CHANGES: dict[str, tuple[Callable[[], Any], Change, str]] = {
    "a mask in an array": (masked(np.array), select, "Masked.mask"),
    "indices of a Subset, in place": (
        lambda: Subset(Indices(), [0, 1, 2]),
        lambda subset, rank: subset.indices.append(5 + rank),
        SUBSET,
    ),
    "names": (lambda: Holding(20, files=[*n20]), shuffle("files"), "Holding.files"),
    "an order": (lambda: Holding(20, order=[*range(20)]), shuffle("order"), "Holding.order"),
    "one of many indices": (
        lambda: Holding(20, pool=[*range(50_000)]),
        lambda data, rank: data.pool.__setitem__(777, 50_000 + rank),
        "Holding.pool",
    ),
    "names in a dict": (
        lambda: Holding(20, split={"train": [*n20]}),
        lambda data, rank: data.split["train"].append(f"new {rank}.png"),
        "Holding.split['train']",
    ),
    "names that are new": (
        lambda: Holding(20),
        put("files", lambda rank: [f"{rank} {name}" for name in n20]),
        "Holding.files",
    ),
    "tensors": (
        lambda: TensorDataset(torch.zeros(20, 3)),
        lambda data, rank: data.tensors[0].add_(rank),
        "the tensors of a TensorDataset",
    ),
}
HONEST: dict[str, tuple[Callable[[], Any], Change]] = {
    "losses": (lambda: Holding(20, losses=[0.0] * 20), put("losses", lambda rank: [*noise(rank, 20)])),
    "pseudo-labels": (lambda: Holding(20, y=[0] * 20), put("y", lambda rank: [(rank + i) % 7 for i in range(20)])),
    "a short setting": (lambda: Holding(20, size=[1, 1]), put("size", lambda rank: [rank, rank + 1])),
    "a deque of numbers": (lambda: Holding(20), put("last", lambda rank: deque([rank] * 20))),
}
READING: dict[str, tuple[Callable[[], Any], Change]] = {
    "a cache of names": (lambda: Holding(20), put("cache", lambda rank: [f"{rank} {name}" for name in n20])),
    "a list that grows": (
        lambda: Holding(20, log=[*range(9)]),
        lambda data, rank: data.log.append(100 + rank + len(data.log)),
    ),
    "a mask of what was read": (
        lambda: Holding(20, seen=np.zeros(20, bool)),
        lambda data, rank: data.seen.put([rank], True),
    ),
}


def found(held: Sequence[HeldData]) -> tuple[str, ...]:
    """Begin a pass on both ranks, and return in what their data differ."""
    for one in held:
        one.begin()
    return HeldData.differing(*(one.told() for one in held))


def differing(make: Callable[[], Any], change: Change, *, while_read: bool = False) -> tuple[str, ...]:
    """Let two ranks make a pass, change their data, or have reading do so, and return what differs in the next."""
    datasets = [make(), make()]
    held = [HeldData(one) for one in datasets]
    assert found(held) == ()
    if not while_read:
        for one in held:
            one.read()
    for rank, dataset in enumerate(datasets):
        change(dataset, rank)
        if while_read:
            held[rank].read()
    return found(held)


@pytest.mark.parametrize("kind", CHANGES)
def test_what_ranks_change_in_other_ways_is_told_and_what_all_change_alike_is_not(kind: str) -> None:
    make, change, name = CHANGES[kind]
    assert differing(make, change) == (name,)
    assert differing(make, lambda data, _: change(data, 1)) == ()
    if "new" not in kind:  # of which one rank alone has none to compare
        assert differing(make, lambda data, rank: rank and change(data, 1)) == (name,)


@pytest.mark.parametrize("kind", HONEST)
def test_what_names_no_samples_is_not_told(kind: str) -> None:
    assert differing(*HONEST[kind]) == ()


@pytest.mark.parametrize("kind", READING)
def test_what_reading_changes_is_never_told(kind: str) -> None:
    assert differing(*READING[kind], while_read=True) == ()


def test_names_that_were_the_samples_at_the_patch_count_whatever_changes_them() -> None:
    assert differing(*CHANGES["names"][:2], while_read=True) == ("Holding.files",)


def test_what_differed_at_the_patch_was_judged_there() -> None:
    masks = [Masked(mask=[place % 3 == rank for place in range(20)]) for rank in range(2)]
    held = [HeldData(one) for one in masks]
    assert found(held) == ()
    masks[0].mask[0] = False
    assert found(held) == ()
