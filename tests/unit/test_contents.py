"""Which samples datasets hold: other ones on each rank show, and nothing else that ranks may rightly differ in."""

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import raises
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, TensorDataset
from zoo import Indices

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.contents import chosen_samples
from ddp_patch.ranks.agreement import require_same_samples

N = 40


class Holding(Dataset[Any]):
    """A user's dataset that keeps things in memory. To ask it for a sample may cost, and differ by rank."""

    def __init__(self, n: Any = N, **held: Any) -> None:
        self.n = n
        vars(self).update(held)

    def __len__(self) -> int:
        return self.n  # type: ignore[no-any-return]  # of any type, for a test

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it was asked for a sample")


def split(data: Any) -> list[Any]:
    """As one splits by hand: each of two ranks takes every second sample."""
    return [data[0::2], data[1::2]]


def hold(**data: Any) -> list[Any]:
    """One dataset for each rank, which holds its part of everything."""
    return [Holding(**{name: split(value)[rank] for name, value in data.items()}) for rank in range(2)]


def names(prefix: str = "/data/") -> list[str]:
    return [f"{prefix}{index}.jpg" for index in range(2 * N)]


LABELS = [index // N for index in range(2 * N)]  # sorted by class, so that both halves look alike
X = torch.arange(2 * N * 3.0).reshape(2 * N, 3)


def differ(datasets: Sequence[Any]) -> bool:
    try:
        require_same_samples({rank: chosen_samples(one) for rank, one in enumerate(datasets)})
    except RankMismatchError:
        return True
    return False


BY_HAND: dict[str, Callable[[], list[Any]]] = {
    "list": lambda: split(list(range(2 * N))),
    "list of paths": lambda: split(names()),
    "list of Paths": lambda: split([Path(name) for name in names()]),
    "list of pairs": lambda: split([*zip(names(), LABELS, strict=True)]),
    "list of dicts": lambda: split([{"path": name, "label": 1} for name in names()]),
    "list of tensors": lambda: split([torch.tensor([index, 1.0]) for index in range(2 * N)]),
    "list of texts": lambda: split([f"{index}{'long ' * 10**6}" for index in range(2)]),
    "list in runs": lambda: [[*range(N)], [*range(N, 2 * N)]],  # of which the first holds its own positions
    "range in runs": lambda: [range(N), range(N, 2 * N)],
    "tuple": lambda: split(tuple(range(2 * N))),
    "range": lambda: split(range(2 * N)),
    "array": lambda: split(np.arange(2 * N * 5).reshape(-1, 5)),
    "tensor": lambda: split(X),
    "TensorDataset": lambda: [TensorDataset(*both) for both in zip(split(X), split(X[:, 0]), strict=True)],
    "Subset of a list": lambda: [Subset(part, range(10)) for part in split(names())],
    "ConcatDataset": lambda: [ConcatDataset([TensorDataset(part), Indices()]) for part in split(X)],
    "StackDataset": lambda: [StackDataset(TensorDataset(part)) for part in split(X)],
    "a dataset of paths": lambda: hold(paths=names(), labels=LABELS),
    "a dataset of labels": lambda: hold(labels=[index % 7 for index in range(2 * N)]),
    "a dataset of tensors": lambda: hold(x=X, y=X[:, 0], mean=[0.5] * 2),
    "a dataset with local indices": lambda: [Holding(x=part, ids=list(range(N))) for part in split(X)],
    "a dataset in a dataset": lambda: [Holding(inner=part) for part in hold(x=X)],
    "a list in another order": lambda: [names(), names()[::-1]],
    "names in folders of their own": lambda: split([f"/data/{index}/image.png" for index in range(2 * N)]),
    "a list of objects": lambda: split([Sample(name) for name in names()]),
    "a dataset of objects": lambda: hold(samples=[Opaque(index) for index in range(2 * N)]),
    "a dict of lists": lambda: [Holding(index={"paths": part}) for part in split(names())],
    "two samples of each": lambda: [Holding(n=2 * N, paths=part) for part in split(names())],
    "made by another seed": lambda: [
        TensorDataset(torch.randn(N, 2, generator=torch.Generator().manual_seed(r))) for r in (0, 1)
    ],
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_data_that_was_split_by_hand_shows(kind: str) -> None:
    assert differ(BY_HAND[kind]())
    assert not differ([BY_HAND[kind]()[0] for _ in range(2)])


class Opaque:
    """Has no value to tell."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass
class Sample:
    path: str


class On:
    """A sample on a device."""

    def __init__(self, path: str, device: str) -> None:
        self.path, self.device = path, device


Row = namedtuple("Row", "number")


class Reads(list[int]):
    """Reads a file for each element."""

    def __getitem__(self, index: Any) -> Any:
        raise OSError("it reads a file")


def same_but(rank: int, **held: Any) -> Holding:
    return Holding(paths=names()[:N], **held)


def by_rank(make: Callable[[int], Any]) -> Callable[[], list[Any]]:
    return lambda: [make(rank) for rank in range(2)]


def noise(rank: int) -> Any:
    return np.random.default_rng(rank)


NO_ALARM: dict[str, Callable[[], list[Any]]] = {
    "copies in folders of their own": by_rank(lambda r: names(f"/scratch/rank{r}/")[:N]),
    "copies on Windows": by_rank(lambda r: names(f"C:\\scratch{r}\\")[:N]),
    "the same in a dataset": by_rank(lambda r: Holding(paths=names(f"/scratch/rank{r}/")[:N])),
    "NaN": by_rank(lambda r: [float("nan")] * N),
    "NaN in tensors": by_rank(lambda r: torch.full((N,), torch.nan)),
    "objects without a value": by_rank(lambda r: [Opaque(r) for _ in range(N)]),
    "a cache that fills up": by_rank(lambda r: Holding(cache=[r if place < N * r else None for place in range(N)])),
    "a full cache and an empty one": by_rank(lambda r: Holding(cache=[[1, 2] if r else None for _ in range(N)])),
    "noise beside the samples": by_rank(lambda r: same_but(r, noise=noise(r).random(N), seeds=[*noise(r).random(N)])),
    "settings": by_rank(lambda r: Holding(size=[r, r], rank=r, name=f"rank {r}", n=3)),
    "as many settings as samples, of which there are few": by_rank(lambda r: Holding(n=3, mean=[r, r, r])),
    "folders of their own, with one name": by_rank(lambda r: Holding(p=[f"/{r}/{i}/a.png" for i in range(N)])),
    "objects on devices of their own": by_rank(lambda r: [On(f"{i}.png", f"cuda:{r}") for i in range(N)]),
    "classes": by_rank(lambda r: Holding(classes=[f"{r} {i}" for i in range(N - 1)])),
    "dicts": by_rank(lambda r: Holding(index=dict.fromkeys(range(N), r))),
    "what reads a file": by_rank(lambda r: Reads([r] * N)),
    "files in memory maps": by_rank(lambda r: mapped(r)),
    "an iterable dataset": by_rank(lambda r: Iterated(r)),
    "a dataset whose length raises": by_rank(lambda r: Holding(n="many", data=[r] * N)),
    "a meta tensor": by_rank(lambda r: TensorDataset(torch.empty(N, r + 1, device="meta"))),
    "a number": by_rank(lambda r: Holding(scale=torch.tensor(float(r)), array=np.array(r))),
    "an empty list": by_rank(lambda r: []),
    "other classes on one rank only": lambda: [names()[:N], Indices(N)],
}


class Iterated(IterableDataset[int]):
    def __init__(self, rank: int) -> None:
        self.data = [rank] * N

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(self.data)


def mapped(rank: int) -> Any:
    values = np.full(N, rank)
    return values.view(np.memmap)


@pytest.mark.parametrize("kind", NO_ALARM)
def test_what_ranks_may_differ_in_is_no_alarm(kind: str) -> None:
    assert not differ(NO_ALARM[kind]())


@pytest.mark.parametrize("value", [Sample("a"), Row(1), {1}, slice(3), 1 + 2j, b"bytes", np.float32(1), True])
def test_any_value_can_be_looked_at(value: Any) -> None:
    assert not differ([[value] * N, [value] * N])


def test_a_look_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Noting(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return 0

    monkeypatch.setattr("ddp_patch.loaders.contents._PLAIN", (Noting,))
    chosen_samples(Noting(range(10**6)))
    assert len(read) == 16
    assert (read[0], read[-1]) == (0, 10**6 - 1)


def test_the_error_names_what_differs_and_the_remedies() -> None:
    facts = ("Agreeing", "rank 0 and rank 1", "different samples", "Holding.paths", "lost")
    remedies = ("data[rank::world_size]", "random data", "is_ddp_aware = True", "order='seeded'")
    with raises(RankMismatchError, facts, remedies):
        told = {rank: chosen_samples(one) for rank, one in enumerate(hold(paths=names(), labels=LABELS))}
        require_same_samples(told)
