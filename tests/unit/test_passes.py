"""A pass: its states, what it keeps alive, and what it says when it finds nothing."""

import gc
import multiprocessing
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from zoo import Indices, N, as_it_is

from ddp_patch import DDPSamplerWrapper, loader_state, patch_dataloader_to_ddp
from ddp_patch.orders.orders import EpochOrder, order_of
from ddp_patch.ranks.log import Progress, State
from ddp_patch.sharding import sampler_passes


def patched(sampler: Any, **options: Any) -> Any:
    loader: DataLoader[Any] = DataLoader(Indices(), 1, sampler=sampler, collate_fn=as_it_is)
    return patch_dataloader_to_ddp(loader, rank=0, num_replicas=1, **options)


def nothing(loader: Any) -> None:
    iter(loader.sampler)


def one_item(loader: Any) -> Any:
    iterator = iter(loader)
    next(iterator)
    return iterator  # kept: a pass whose iterator is gone was left


def all_of_it(loader: Any) -> None:
    list(loader)


def a_break(loader: Any) -> None:
    for _ in loader:
        break
    gc.collect()


@pytest.mark.parametrize("do", [all_of_it, a_break])
def test_an_epochs_order_is_freed_after_it(do: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[weakref.ref[torch.Tensor]] = []

    def watched(sampler: Any, epoch: int, private_generator: Any) -> EpochOrder:
        order = order_of(sampler, epoch, private_generator)  # not that of ``sampler_passes``, which this replaces
        at: Any = order.at
        drawn.append(weakref.ref(at.args[0]))
        return order

    monkeypatch.setattr(sampler_passes, "order_of", watched)
    loader = patched(RandomSampler(Indices()))
    for number in range(1, 3):
        do(loader)
        assert len(drawn) == number
        assert drawn[-1]() is None
    kept = one_item(loader)
    assert drawn[-1]() is not None  # while it is needed
    del kept


class Held(IterableDataset[int]):
    """Comes to its end when it is told to."""

    def __init__(self) -> None:
        self.may_end = multiprocessing.Event()

    def __iter__(self) -> Iterator[int]:
        yield from range(8)
        self.may_end.wait(60)


@pytest.mark.parametrize("takes_all", [True, False])
def test_what_a_pass_took_does_not_depend_on_when_its_worker_finds_the_end(takes_all: bool) -> None:
    """Else two ranks that do the same would have different logs."""
    dataset = Held()
    given: Any = DataLoader(dataset, 2, collate_fn=as_it_is, num_workers=1)
    train: Any = patch_dataloader_to_ddp(given, rank=0, num_replicas=2)
    batches = iter(train)
    next(batches)
    one = train.sampler.rank_passes.latest
    assert one.progress() == Progress(1, 1)
    dataset.may_end.set()
    while one.source.lengths_found() == [None]:  # the test's time limit ends it
        time.sleep(0.001)
    assert one.progress() == Progress(1, 1)
    if takes_all:
        assert len(list(batches)) == 1
    del batches
    assert one.progress() == (Progress(2, 2, State.ENDED) if takes_all else Progress(1, 1))


def test_who_asks_for_a_state_changes_nothing() -> None:
    """Only rank 0 may save checkpoints. Else it would count in batches from then on, and the others in items."""
    sampler: DDPSamplerWrapper[int] = DDPSamplerWrapper(range(N), False, rank=0, num_replicas=2)
    loader = DataLoader(Indices(), 3, sampler=sampler, collate_fn=as_it_is)
    batches = iter(loader)
    next(batches)
    latest: Any = sampler.rank_passes.latest
    before = latest.progress()
    assert loader_state(loader, batches_done=1)["parts"] == [[[2, 3]]]
    assert latest.progress() == before
