"""Iterable datasets with a state of their own, as torchdata's tests have them: each batch comes once after a stop."""

import pickle
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle, islice, product
from typing import Any

import pytest
import torch
from quick import soaked
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from zoo import as_it_is

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader

N = 40


def part() -> list[int]:
    """What this worker reads: parts of unequal lengths, or all."""
    info = get_worker_info()
    return list(range(N)) if info is None else list(range(N)[:12] if info.id == 0 else range(N)[12:])


class Place:
    """An iterator that tells where it stands."""

    def __init__(self, items: Sequence[int] = range(N), epoch: int = 0) -> None:
        self.items, self.at, self.epoch = items, 0, epoch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1], self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"nest": {"at": self.at}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["nest"]["at"]


class Own(Place, IterableDataset[Any]):
    """Its own iterator, which stays at its end."""


class Draws(Own):
    """Its state has the global generator's, and more keys at each item."""

    def __next__(self) -> Any:
        return super().__next__(), int(torch.randint(1000, ()))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **{str(at): at for at in range(self.at)}, "generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        torch.set_rng_state(state["generator"])


class OwnCountsEpochs(Own):
    """Its own iterator, of which each epoch has other items."""

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.at, self.epoch = 0, self.epoch + 1
            raise

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class OwnFromIter(IterableDataset[Any]):
    """Its own iterator, which has a state only once ``iter()`` was called: that begins anew."""

    def __iter__(self) -> Iterator[Any]:
        self.place = Place(part())
        return self

    def __next__(self) -> Any:
        return next(self.place)

    def state_dict(self) -> dict[str, Any]:
        return self.place.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place.load_state_dict(state)


class IteratorHas(IterableDataset[Any]):
    """Its iterator has the state."""

    def __iter__(self) -> Iterator[Any]:
        return Place(part())


class BothHave(IterableDataset[Any]):
    """Its iterator has the place, and it has the epoch, which ``iter()`` begins."""

    epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return Place(part(), self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class CountsEpochs(IterableDataset[Any]):
    """A generator that goes on from its state, and counts the epochs at their ends."""

    at = begins = epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begins = self.begins, 0
        for item in part()[self.at :]:
            self.at += 1
            yield item, self.epoch
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins, self.epoch = state["at"], state["epoch"]


KINDS: list[Any] = [Own, Draws, OwnCountsEpochs, OwnFromIter, IteratorHas, BothHave, CountsEpochs]
SHARES = [(None, 0, 1), (7, 0, 1), (7, 0, 2), (None, 1, 2), (7, 1, 2)]  # batch size, rank, ranks
STOPS = [0, 1, 2, "middle", "last", "end"]
PLACES = ["the same", "the same, read on", "a new one", "a new one over the same dataset"]


def patched(dataset: Any, share: Any, options: Any) -> Any:
    torch.manual_seed(0)
    batch_size, rank, ranks = share
    given: Any = DataLoader(dataset, batch_size=batch_size, collate_fn=as_it_is, **dict(options))
    return patch_dataloader_to_ddp(given, rank=rank, num_replicas=ranks)


@cache
def uninterrupted(kind: Any, share: Any, options: Any) -> list[list[Any]]:
    running = patched(kind(), share, options)
    return [list(running) for _ in range(3)]


def assert_goes_on(kind: Any, options: Any, share: Any, epoch: int, stop: Any, place: str) -> None:
    whole, dataset = uninterrupted(kind, share, options), kind()
    batches = {"middle": len(whole[epoch]) // 2, "last": len(whole[epoch]), "end": N + 1}.get(stop, stop)
    stopped = patched(dataset, share, options)
    assert [list(stopped) for _ in range(epoch)] == whole[:epoch]
    running = iter(stopped)
    assert list(islice(running, batches)) == whole[epoch][:batches]
    state = pickle.dumps(loader_state(stopped))
    assert str(pickle.loads(state)) == str(loader_state(stopped))  # noqa: S301 - our own
    if place == "the same, read on":
        list(running)
    given = dataset if place.endswith("dataset") else kind()
    resumed = patched(given, share, options) if place.startswith("a new one") else stopped
    restore_loader(resumed, pickle.loads(state))  # noqa: S301 - our own
    rest = whole[epoch + 1 :] if stop == "end" else [whole[epoch][batches:], *whole[epoch + 1 :]]
    assert [list(resumed) for _ in rest[:2]] == rest[:2], (share, epoch, stop, place)


@pytest.mark.parametrize("kind", KINDS)
def test_every_stop_without_workers(kind: Any) -> None:
    for (epoch, stop, place), share in zip(product(range(2), STOPS, PLACES), cycle(SHARES), strict=False):
        assert_goes_on(kind, (("num_workers", 0),), share, epoch, stop, place)


# Every other stop with workers that persist; the session soak tries the others, and workers that do not.
@pytest.mark.parametrize(("persistent", "first"), [(True, 1), soaked(True, 0), soaked(False, 0), soaked(False, 1)])
@pytest.mark.parametrize("kind", [OwnCountsEpochs, OwnFromIter, BothHave, CountsEpochs])
def test_stops_with_workers(kind: Any, persistent: bool, first: int) -> None:
    options = (("num_workers", 2), ("persistent_workers", persistent))
    ways = zip(STOPS, cycle(PLACES), cycle(SHARES[:1] + SHARES[-1:]), strict=False)
    for stop, place, share in islice(ways, first, None, 2):
        assert_goes_on(kind, options, share, 1, stop, place)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_before_the_first_pass_has_where_the_dataset_stands(num_workers: int) -> None:
    def made(at: int) -> Any:
        dataset = Own()
        dataset.at = at
        return patched(dataset, SHARES[0], (("num_workers", num_workers), ("persistent_workers", num_workers > 0)))

    stopped, resumed = made(17), made(0)
    restore_loader(resumed, loader_state(stopped))
    assert list(resumed) == list(stopped)
