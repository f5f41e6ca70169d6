"""What a dataset holds in each pass: what users change counts, and what reading changes does not."""

import random
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ddp_patch.loaders.contents import HeldData

N = 20


class Data(Dataset[Any]):
    """Holds what it is given."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nothing is loaded for a comparison")


class View(Data):
    """The samples behind a mask, as in active learning: it has another length than the mask."""

    mask: Any

    def __len__(self) -> int:
        return sum(bool(one) for one in self.mask)


def found(held: Sequence[HeldData]) -> tuple[str, ...]:
    """Begin a pass on both ranks, and return in what their data differ."""
    for one in held:
        one.begin()
    return HeldData.differing(*(one.told() for one in held))


def words() -> Iterator[str]:
    return map("{}.png".format, range(N))


def view(kind: Callable[[list[bool]], Any]) -> View:
    return View(mask=kind([place < 6 for place in range(4 * N)]))


def read(held: list[HeldData]) -> None:
    for one in held:
        one.read()


def differing(datasets: list[Any], *changes: Callable[[Any, int], object], while_read: bool = False) -> tuple[str, ...]:
    """Let two ranks make a pass, change their data, or have reading do so, and return what differs in the next."""
    held = [HeldData(one) for one in datasets]
    assert found(held) == ()
    for change in changes:
        if not while_read:
            read(held)
        for rank, dataset in enumerate(datasets):
            change(dataset, rank)
        if while_read:
            read(held)
    return found(held)


def select(dataset: Any, rank: int) -> None:
    dataset.mask[40 + rank] = True


def shuffle(name: str) -> Callable[[Any, int], object]:
    def change(dataset: Any, rank: int) -> None:
        values = getattr(dataset, name)
        order = np.random.default_rng(rank).permutation(len(values)).tolist()
        values[:] = [values[place] for place in order]

    return change


def put(name: str, make: Callable[[int], Any]) -> Callable[[Any, int], object]:
    return lambda dataset, rank: setattr(dataset, name, make(rank))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], object], str]] = {
    "a mask in a list": (lambda: view(list), select, "View.mask"),
    "a mask in an array": (lambda: view(np.array), select, "View.mask"),
    "a mask in a tensor": (lambda: view(torch.tensor), select, "View.mask"),
    "indices of a Subset, in place": (
        lambda: Subset(range(N), [0, 1, 2]),  # type: ignore[arg-type]  # a range is a dataset
        lambda subset, rank: subset.indices.append(5 + rank),
        "the indices of a Subset",
    ),
    "indices of a Subset, anew": (
        lambda: Subset(range(N), [0, 1, 2]),  # type: ignore[arg-type]  # as above
        put("indices", lambda rank: [0, 1, 5 + rank]),
        "the indices of a Subset",
    ),
    "names": (lambda: Data(files=list(words())), shuffle("files"), "Data.files"),
    "an order": (lambda: Data(order=list(range(N))), shuffle("order"), "Data.order"),
    "one of many indices": (
        lambda: Data(pool=[*range(50_000)]),
        lambda data, rank: data.pool.__setitem__(777, 50_000 + rank),
        "Data.pool",
    ),
    "names in a dict": (
        lambda: Data(split={"train": list(words())}),
        lambda data, rank: data.split["train"].append(f"new {rank}.png"),
        "Data.split['train']",
    ),
    "names that are new": (lambda: Data(), put("files", lambda rank: [f"{rank} {w}" for w in words()]), "Data.files"),
    "tensors": (
        lambda: TensorDataset(torch.zeros(N, 3)),
        lambda data, rank: data.tensors[0].add_(rank),
        "the tensors of a TensorDataset",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_each_rank_changes_its_own_way_is_told(kind: str) -> None:
    make, change, name = CHANGES[kind]
    assert differing([make(), make()], change) == (name,)


@pytest.mark.parametrize("kind", CHANGES)
def test_what_one_rank_alone_changes_is_told(kind: str) -> None:
    make, change, name = CHANGES[kind]
    if "new" not in kind:
        assert differing([make(), make()], lambda data, rank: rank and change(data, 1)) == (name,)


@pytest.mark.parametrize("kind", CHANGES)
def test_what_all_ranks_change_alike_is_not(kind: str) -> None:
    make, change, _ = CHANGES[kind]
    assert differing([make(), make()], lambda data, _: change(data, 1)) == ()


HONEST: dict[str, tuple[Callable[[], Any], Callable[[Any, int], object]]] = {
    "losses": (lambda: Data(losses=[0.0] * N), put("losses", lambda rank: [random.random() for _ in range(N)])),
    "a tensor of losses": (lambda: Data(losses=torch.zeros(N)), put("losses", lambda _: torch.rand(N))),
    "counts": (lambda: Data(counts=[0] * N), put("counts", lambda rank: [rank] * N)),
    "pseudo-labels": (lambda: Data(y=[0] * N), put("y", lambda rank: [(rank + i) % 7 for i in range(N)])),
    "an epoch and a seed": (lambda: Data(epoch=0), put("seed", lambda rank: rank)),
    "a short setting": (lambda: Data(size=[1, 1]), put("size", lambda rank: [rank, rank + 1])),
    "a deque of numbers": (lambda: Data(last=deque([0] * N)), put("last", lambda rank: deque([rank] * N))),
}


@pytest.mark.parametrize("kind", HONEST)
def test_what_names_no_samples_is_not_told(kind: str) -> None:
    make, change = HONEST[kind]
    assert differing([make(), make()], change) == ()


READING: dict[str, tuple[Callable[[], Any], Callable[[Any, int], object]]] = {
    "a cache of names": (lambda: Data(), put("cache", lambda rank: [f"{rank} {word}" for word in words()])),
    "a list that grows": (
        lambda: Data(log=[*range(9)]),
        lambda data, rank: data.log.append(100 + rank + len(data.log)),
    ),
    "a mask of what was read": (lambda: Data(seen=np.zeros(N, bool)), lambda data, rank: data.seen.put([rank], True)),
}


@pytest.mark.parametrize("kind", READING)
def test_what_reading_changes_is_never_told(kind: str) -> None:
    make, change = READING[kind]
    assert differing([make(), make()], change, while_read=True) == ()


def test_once_reading_has_changed_it_a_change_of_the_users_counts_no_more() -> None:
    make, change = READING["a mask of what was read"]
    datasets = [make(), make()]
    held = [HeldData(one) for one in datasets]
    for one in held:
        one.begin()
    for rank, dataset in enumerate(datasets):
        change(dataset, rank)
        held[rank].read()
        dataset.seen[5 + rank] = True
    assert found(held) == ()


def test_names_that_were_the_samples_at_the_patch_count_whatever_changes_them() -> None:
    assert differing([Data(files=list(words())) for _ in range(2)], shuffle("files"), while_read=True) == (
        "Data.files",
    )


def test_what_differed_at_the_patch_was_judged_there() -> None:
    masks = [View(mask=[place % 3 == rank for place in range(N)]) for rank in range(2)]
    held = [HeldData(one) for one in masks]
    assert found(held) == ()
    masks[0].mask[0] = False
    assert found(held) == ()


def test_a_look_at_large_data_copies_a_part_of_it() -> None:
    many = 10**7
    held = HeldData(Data(files=["a.png"] * many, indices=[*range(many)], mask=np.zeros(many, bool), y=torch.ones(many)))
    tracemalloc.start()
    held.begin()
    held.told()
    held.read()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < many  # bytes, of hundreds of millions that the data has
