"""What the columns of two ranks' datasets say together: at the patch, and when a pass begins."""

import random
import tempfile
import tracemalloc
from array import array
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from messages import assert_tells, raises
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from zoo import Indices

from ddp_patch.errors import InvalidOptionError, RankMismatchError
from ddp_patch.loaders.columns import Verdict, columns_digest, columns_of, compared
from ddp_patch.loaders.facts import data_digest
from ddp_patch.ranks.agreement import likely_text, require_same_data

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


@dataclass
class Sample:
    path: str
    label: int = 0


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
        self.data = [*range(rank, rank + N)]

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(self.data)


Row = namedtuple("Row", "number")


def names(folder: str = "/data/", n: int = 2 * N) -> list[str]:
    return [f"{folder}{index}.jpg" for index in range(n)]


LABELS = [index // N for index in range(2 * N)]  # sorted by class, so that both halves look alike
X = torch.arange(2 * N * 3.0).reshape(2 * N, 3)
PATHS = names(n=N)


def part(data: Any) -> Make:
    """As one splits by hand: each of two ranks takes every second sample."""
    return lambda rank: data[rank::2]


def hold(**data: Any) -> Make:
    """A dataset for each rank, which holds its part of everything."""
    return lambda rank: Holding(**{name: value[rank::2] for name, value in data.items()})


def beside(**make: Make) -> Make:
    """The same names on each rank, and something else beside them."""
    return lambda rank: Holding(paths=PATHS, **{name: each(rank) for name, each in make.items()})


def noise(rank: int, n: int = N) -> Any:
    return np.random.default_rng(rank).random(n)


def shuffled(values: Sequence[Any], rank: int) -> list[Any]:
    return random.Random(rank).sample([*values], len(values))


def mapped(rank: int) -> Any:
    with tempfile.TemporaryFile() as file:
        found = np.memmap(file, dtype=np.int64, mode="w+", shape=(N,))
    found[:] = range(rank, 2 * N, 2)
    return Holding(rows=found)


def filled(rank: int) -> list[Any]:
    """A cache in which each rank has put what it has read."""
    return [place if place % 2 == rank else None for place in range(N)]


# ---- at the patch: what each rank holds; the columns that certainly, and that probably, show another part ----

SUBSET, LIST = "the indices of a Subset", "the elements of a list"
CERTAIN: dict[str, tuple[Make, str]] = {
    "list": (part(list(range(2 * N))), LIST),
    "list of paths": (part(names()), LIST),
    "list of pairs": (part([*zip(names(), LABELS, strict=True)]), LIST),
    "list in runs, of which the first holds its own places": (lambda rank: [*range(rank * N, rank * N + N)], LIST),
    "list in another order": (lambda rank: names()[:: -1 if rank else 1], LIST),
    "two of many in another order": (lambda rank: [*range(rank), *range(rank + 1, N), rank], LIST),
    "names in folders of their own": (part([f"/data/{index}/image.png" for index in range(2 * N)]), LIST),
    "pairs that tell samples apart together": (
        lambda rank: [(place // 8 + rank, place % 8) for place in range(N)],
        LIST,
    ),
    "tensor": (part(X), "the elements of a Tensor"),
    "tensor of half floats": (part(X.bfloat16()), "the elements of a Tensor"),
    "TensorDataset": (lambda rank: TensorDataset(X[rank::2], torch.zeros(N)), "tensors[0] of a TensorDataset"),
    "an unseeded split": (lambda rank: Subset(Indices(2 * N), shuffled(range(2 * N), rank)[:N]), SUBSET),
    "an unseeded split that a dataset holds": (
        lambda rank: Holding(subset=Subset(Indices(99), shuffled(range(99), rank)[:N])),
        SUBSET,
    ),
    "Subset of a list": (lambda rank: Subset(names()[rank::2], range(10)), LIST),  # type: ignore[arg-type]  # will do
    "ConcatDataset": (
        lambda rank: ConcatDataset([TensorDataset(X[rank::2]), Indices()]),
        "tensors[0] of a TensorDataset",
    ),
    "the second of two alike": (
        lambda rank: ConcatDataset([Holding(paths=PATHS), Holding(paths=names("b")[rank * N :][:N])]),
        "Holding.paths (number 2)",
    ),
    "a dataset of paths": (hold(paths=names(), labels=LABELS), "Holding.paths"),
    "a dataset of tensors": (lambda rank: Holding(x=X[rank::2], mean=[0.5] * 2), "Holding.x"),
    "a dataset of objects": (hold(samples=[*map(Numbered, range(2 * N))]), "Holding.samples"),
    "a dataset of dataclasses": (hold(samples=[*map(Sample, names())]), "Holding.samples"),
    "a dataset of dicts": (hold(rows=[{"id": place, "x": 0.5} for place in range(2 * N)]), "Holding.rows"),
    "an array": (lambda rank: array("q", range(rank, 2 * N, 2)), "the elements of a array"),
    "a file in memory": (mapped, "Holding.rows"),
    "a dict of columns": (lambda rank: Holding(split=OrderedDict(train=names()[rank::2])), "Holding.split['train']"),
    "an object": (lambda rank: Holding(index=SimpleNamespace(files=names()[rank::2])), "Holding.index['files']"),
    "files, beside places": (lambda rank: Holding(at=[*range(N)], paths=shuffled(PATHS, rank)), "Holding.paths"),
    "values, beside places": (lambda rank: Holding(at=[*range(N)], x=X[rank::2]), "Holding.x"),
    "names, beside numbers": (
        lambda rank: Holding(ids=[*range(5, N + 5)], paths=shuffled(PATHS, rank)),
        "Holding.paths",
    ),
    "unseeded data": (lambda rank: TensorDataset(torch.from_numpy(noise(rank))), "tensors[0] of a TensorDataset"),
}
LIKELY: dict[str, tuple[Make, str]] = {
    "labels": (lambda rank: Holding(labels=shuffled(LABELS, rank)[:N]), "Holding.labels"),
    "all alike": (lambda rank: [rank] * N, LIST),
    "a mask": (lambda rank: Holding(mask=noise(rank) > 0.5), "Holding.mask"),
    "labels beside places": (lambda rank: Holding(at=[*range(N)], y=shuffled(LABELS, rank)[:N]), "Holding.y"),
    "tokens that samples are cut from": (lambda rank: Holding(tokens=np.arange(rank, 4 * N + rank)), "Holding.tokens"),
    "a series that windows are cut from": (lambda rank: Holding(x=torch.from_numpy(noise(rank, N + 9))), "Holding.x"),
    "labels beside a Subset": (lambda rank: Subset([rank] * N, [5, 6, 7]), LIST),  # type: ignore[arg-type]  # will do
    "blank pictures": (
        lambda rank: TensorDataset(torch.full((N, 3, 9, 9), float(rank))),
        "tensors[0] of a TensorDataset",
    ),
}
NOTHING: dict[str, Make] = {
    "copies in folders of their own": lambda rank: names(f"/scratch/rank{rank}/", N),
    "the same in a dataset": lambda rank: Holding(paths=names(f"/scratch/rank{rank}/", N)),
    "signed URLs": lambda rank: [f"https://host/{place}.jpg?signature={rank}" for place in range(N)],
    "NaN": lambda rank: [float("nan")] * N,
    "a cache that fills up": lambda rank: Holding(cache=filled(rank)),
    "a cache by index": lambda rank: Holding(cache={place: place for place in range(rank, N, 2)}),
    "noise beside names": beside(noise=noise, seeds=lambda rank: [*noise(rank)]),
    "seeds of augmentation beside names": beside(
        seeds=lambda rank: np.random.default_rng(rank).integers(2**31, size=N)
    ),
    "a longer array beside names": beside(pool=lambda rank: noise(rank, 9 * N)),
    "labels beside names": beside(y=lambda rank: shuffled(LABELS, rank)[:N]),
    "noise beside numbers": lambda rank: Holding(ids=[*range(5, N + 5)], noise=noise(rank)),
    "settings": lambda rank: Holding(size=[rank, rank], rank=rank, name=f"rank {rank}", n=3),
    "lists of other lengths": lambda rank: Holding(log=[*range(rank, rank + 17)], pool=[*range(rank, rank + 999)]),
    "a closure": lambda rank: Holding(read=lambda: names()[rank::2]),
    "objects on devices of their own": lambda rank: [Numbered(place, device=f"cuda:{rank}") for place in range(N)],
    "what reads a file": lambda rank: Reads([rank] * N),
    "an iterable dataset": Iterated,
    "a dataset whose length raises": lambda rank: Holding(n="many", data=[rank] * N),
    "other classes on one rank only": lambda rank: Indices(N) if rank else names()[:N],
    "an empty list": lambda rank: [],
    **{
        f"any value: {type(value).__name__}": lambda rank, value=value: [value] * N  # type: ignore[misc]  # a default binds it
        for value in (Sample("a"), Row(1), {1}, slice(3), 1 + 2j, b"bytes", np.float32(1), True, object())
    },
}


def verdict(make: Make, *ranks: int) -> Verdict:
    return compared({place: columns_of(make(rank)) for place, rank in enumerate(ranks)})


@pytest.mark.parametrize("kind", CERTAIN)
def test_another_part_or_order_of_what_tells_samples_apart_is_certain(kind: str) -> None:
    make, name = CERTAIN[kind]
    assert verdict(make, 0, 1).certain == (name,)
    assert verdict(make, 0, 0)[:2] == ((), ())


@pytest.mark.parametrize("kind", LIKELY)
def test_what_tells_no_samples_apart_is_likely_to_show_another_part(kind: str) -> None:
    make, name = LIKELY[kind]
    assert verdict(make, 0, 1)[:2] == ((), (name,))
    assert verdict(make, 0, 0)[:2] == ((), ())


@pytest.mark.parametrize("kind", NOTHING)
def test_what_ranks_may_differ_in_says_nothing(kind: str) -> None:
    assert verdict(NOTHING[kind], 0, 1)[:2] == ((), ())


def test_the_error_names_what_differs_and_the_remedies() -> None:
    columns = {rank: columns_of(hold(paths=names(), labels=LABELS)(rank)) for rank in range(2)}
    facts = ("Agreeing", "rank 0 and rank 1", "different samples", "Holding.paths", "lost")
    remedies = ("data[rank::world_size]", "random data", "is_ddp_aware = True", "fingerprint=None")
    with raises(RankMismatchError, facts, remedies):
        require_same_data(columns)


def test_the_warning_names_what_differs_both_causes_and_how_to_tell_which() -> None:
    found = verdict(LIKELY["labels"][0], 0, 1)
    facts = ("loaders['val']: Agreeing", "Holding.labels", "nothing is lost", "samples are lost")
    assert_tells(likely_text("loaders['val']", found), facts, ("to know which", "fingerprint=", "fingerprint=None"))
    assert likely_text("", verdict(LIKELY["labels"][0], 0, 0)) == ""


# ---- when a pass begins: what is compared then, and what each rank has done to its data since the patch ----

Change = Callable[[Any, int], object]


def put(name: str, make: Make) -> Change:
    return lambda dataset, rank: setattr(dataset, name, make(rank))


CHANGED: dict[str, tuple[Callable[[], Any], Change]] = {
    "names": (lambda: Holding(paths=[*PATHS]), lambda data, rank: random.Random(rank).shuffle(data.paths)),
    "an order": (lambda: Holding(order=[*range(N)]), put("order", lambda rank: shuffled(range(N), rank))),
    "names in a dict": (
        lambda: Holding(split={"train": [*PATHS]}),
        lambda data, rank: random.Random(rank).shuffle(data.split["train"]),
    ),
    "the indices of a Subset": (
        lambda: Subset(Indices(), [0, 1, 2]),
        lambda subset, rank: subset.indices.append(5 + rank),
    ),
    "one of several columns": (
        lambda: Holding(300, **{f"x{place}": [*range(place, 300 + place)] for place in range(4)}),
        put("x3", lambda rank: shuffled(range(300), rank)),
    ),
    "tensors": (lambda: TensorDataset(X.clone()), lambda data, rank: data.tensors[0].add_(rank)),
}
UNCHANGED: dict[str, tuple[Callable[[], Any], Change]] = {
    "losses": (lambda: Holding(losses=[0.0] * N), put("losses", lambda rank: [*noise(rank)])),
    "weights beside names": (
        lambda: Holding(paths=PATHS, weights=[*noise(7)]),
        put("weights", lambda rank: [*noise(rank)]),
    ),
    "pseudo-labels": (lambda: Holding(y=[0] * N), put("y", lambda rank: [(rank + i) % 7 for i in range(N)])),
    "a mask": (lambda: Holding(mask=[False] * N), lambda data, rank: data.mask.__setitem__(rank, True)),
    "a cache that each rank fills with its own": (
        lambda: Holding(cache=[None] * N),
        put("cache", lambda rank: [f"{place} {rank}" for place in range(N)]),
    ),
    "an array that each rank fills with its own": (
        lambda: Holding(cache=np.full(N, -1)),
        put("cache", lambda rank: np.arange(N) + rank),
    ),
    "a cache that was full at the patch, and one rank drops": (
        lambda: Holding(paths=PATHS, cache=[f"{place} read" for place in range(N)]),
        lambda data, rank: rank and data.cache.clear(),
    ),
    "a log": (lambda: Holding(log=[]), lambda data, rank: data.log.extend(shuffled(range(N), rank))),
}


def digests(make: Callable[[], Any], change: Change, ranks: Sequence[int] = (0, 1)) -> list[str]:
    """Let ranks agree on data, change them, and return what these say of them when the next pass begins."""
    datasets = [make() for _ in ranks]
    columns = compared({rank: columns_of(dataset) for rank, dataset in zip(ranks, datasets, strict=True)}).kept
    before = [columns_digest(dataset, columns) for dataset in datasets]
    assert len({*before}) == 1
    for rank, dataset in zip(ranks, datasets, strict=True):
        change(dataset, rank)
    return [columns_digest(dataset, columns) for dataset in datasets]


@pytest.mark.parametrize("kind", CHANGED)
def test_what_ranks_change_in_other_ways_is_told_and_what_all_change_alike_is_not(kind: str) -> None:
    make, change = CHANGED[kind]
    mine, theirs = digests(make, change)
    assert mine
    assert theirs
    assert mine != theirs
    assert len({*digests(make, lambda data, _: change(data, 1))}) == 1


@pytest.mark.parametrize("kind", UNCHANGED)
def test_what_told_no_samples_apart_at_the_patch_may_become_anything(kind: str) -> None:
    found = digests(*UNCHANGED[kind])
    assert "" in found or len({*found}) == 1  # an empty one says nothing


def test_a_look_copies_little() -> None:
    many = 10**7
    data = Holding(many, files=["a"] * many, at=[*range(many)], mask=np.zeros(many, bool), y=torch.ones(many, 2))
    tracemalloc.start()
    columns_digest(data, [column.name for column in columns_of(data)])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < many  # bytes, of hundreds of millions that the data has


# ---- what the user says ----


def test_a_function_of_the_users_says_what_identifies_the_data() -> None:
    mine, theirs = ({"paths": PATHS}, {"paths": PATHS[::-1]})
    version: Callable[[Any], object] = lambda data: data.version  # noqa: E731 - as users write it
    assert data_digest(Holding(version=3, **mine), version, ()) == data_digest(
        Holding(version=3, **theirs), version, ()
    )
    assert data_digest(Holding(version=3), version, ()) != data_digest(Holding(version=4), version, ())
    assert data_digest(Holding(**mine), None, ["Holding.paths"]) == ""


def test_a_function_that_returns_nothing_is_refused() -> None:
    with raises(InvalidOptionError, ("returned None", "Holding"), ("Let it return", "fingerprint=None")):
        data_digest(Holding(), lambda _: None, ())


class Slow:
    """A sample whose methods take long."""

    asked = 0

    def __len__(self) -> int:
        Slow.asked += 1
        return 7

    def __eq__(self, other: object) -> bool:
        Slow.asked += 1
        return True

    def __hash__(self) -> int:
        Slow.asked += 1
        return 1


def test_no_method_of_a_sample_is_called_at_the_patch() -> None:
    assert columns_of(Holding(rows=[Slow() for _ in range(N)]))
    assert not Slow.asked
