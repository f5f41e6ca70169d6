"""Loaders with one iterator for all epochs: sharded inside what repeats their batch sampler."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from messages import raises
from repeaters import BegunAtFirst, Infinite, MultiEpochs, RepeatSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from zoo import Broken, Indices

from ddp_patch import (
    audit,
    check_loaders_is_patched,
    gather_in_order,
    iter_with_mask,
    loader_state,
    patch_dataloader_to_ddp,
    restore_loader,
)
from ddp_patch.errors import InvalidOptionError, StateError, UnsupportedLoaderError
from ddp_patch.loaders.copying import repeater_in
from ddp_patch.loaders.facts import look_at

N = 21


class ByClass(BatchSampler):
    """A batch sampler of the user's own, which is shared in whole batches."""


class Forever(RepeatSampler):
    """The same by a name that nobody knows."""


def of_another_name(given: Any) -> DataLoader[Any]:
    object.__setattr__(given, "batch_sampler", Forever(given.batch_sampler.sampler))
    loader: DataLoader[Any] = given
    return loader


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "timm": lambda: MultiEpochs(Indices(N), 4, shuffle=True),
    "timm, last batch dropped": lambda: MultiEpochs(Indices(N), 4, shuffle=True, drop_last=True),
    "timm, items": lambda: MultiEpochs(Indices(N), batch_size=None, shuffle=True),
    "timm, workers": lambda: MultiEpochs(Indices(N), 4, shuffle=True, num_workers=2),
    "ultralytics": lambda: Infinite(Indices(N), 4, shuffle=True, generator=torch.Generator()),
    "ultralytics, workers": lambda: Infinite(Indices(N), 4, shuffle=True, num_workers=2, prefetch_factor=4),
    "ultralytics, persistent": lambda: Infinite(Indices(N), 4, num_workers=2, persistent_workers=True),
    "whole batches": lambda: Infinite(
        Indices(N), batch_sampler=ByClass(RandomSampler(range(N)), 4, drop_last=False), collate_fn=torch.tensor
    ),
    "begun at first": lambda: BegunAtFirst(Indices(N), 4, shuffle=True),
    "of another name": lambda: of_another_name(BegunAtFirst(Indices(N), 4, shuffle=True)),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
QUICK = {name: make for name, make in KINDS.items() if name in {"timm", "ultralytics, workers", "whole batches"}}
some_kinds = pytest.mark.parametrize("make", QUICK.values(), ids=QUICK)


def patched(make: Callable[[], DataLoader[Any]], rank: int = 0, ranks: int = 2, **options: Any) -> Any:
    return patch_dataloader_to_ddp(make(), rank=rank, num_replicas=ranks, seed=5, **options)


def epoch_of(loader: Any) -> list[int]:
    return [int(index) for batch in loader for index in torch.as_tensor(batch).reshape(-1)]


def plain(make: Callable[[], DataLoader[Any]], rank: int = 0) -> Any:
    """The same share by an ordinary DataLoader."""
    given: Any = make()
    inner = given.sampler.sampler if given.batch_sampler is None else given.batch_sampler.sampler
    loader: DataLoader[Any]
    if given.batch_sampler is None:
        loader = DataLoader(Indices(N), batch_size=None, sampler=inner)
    else:
        loader = DataLoader(Indices(N), batch_sampler=inner, collate_fn=given.collate_fn)
    return patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2, seed=5)


@every_kind
def test_every_epoch_is_that_of_an_ordinary_loader(make: Callable[[], DataLoader[Any]]) -> None:
    for rank in range(2):
        loader, ordinary = patched(make, rank), plain(make, rank)
        assert type(loader) is type(make())
        assert check_loaders_is_patched(loader)
        for _ in range(3):
            assert len(loader) == len(ordinary)
            assert epoch_of(loader) == epoch_of(ordinary)


@every_kind
def test_the_given_loader_goes_on_as_before(make: Callable[[], DataLoader[Any]]) -> None:
    given: Any = make()
    running, repeater = given.iterator, given.sampler if given.batch_sampler is None else given.batch_sampler
    inner = repeater.sampler
    loader = patch_dataloader_to_ddp(given, rank=0, num_replicas=2)
    epoch_of(loader)
    assert given.iterator is running
    assert repeater.sampler is inner
    assert len(epoch_of(given)) == len(epoch_of(given)) == (20 if given.drop_last else N)


@some_kinds
def test_set_epoch_chooses_the_very_next_epoch(make: Callable[[], DataLoader[Any]]) -> None:
    free = patched(make)
    epochs = [epoch_of(free) for _ in range(6)]
    for name in ("set_epoch", "sampler.set_epoch"):
        told = patched(make)
        set_epoch = operator.attrgetter(name)(told)
        for epoch in (0, 1, 2, 5, 1, 1):
            set_epoch(epoch)
            assert epoch_of(told) == epochs[epoch]
        assert epoch_of(told) == epochs[2]


@some_kinds
def test_after_a_break_it_goes_on_as_the_given_loader_does(make: Callable[[], DataLoader[Any]]) -> None:
    whole = patched(make)
    stream = [int(index) for _ in range(3) for index in epoch_of(whole)]
    loader = patched(make)
    batches = iter(loader)
    seen = [int(index) for _ in range(2) for index in next(batches)]
    seen += epoch_of(loader)
    assert seen == stream[: len(seen)]
    # A set_epoch begins the epoch that was asked for, also the one that was left in the middle.
    loader.set_epoch(1)
    assert epoch_of(loader) == epoch_of(loader_at(make, 1))


def loader_at(make: Callable[[], DataLoader[Any]], epoch: int) -> Any:
    loader = patched(make)
    loader.set_epoch(epoch)
    return loader


def test_a_rest_of_no_batch_is_refused() -> None:
    def make() -> DataLoader[Any]:
        return MultiEpochs(Indices(5), 1)

    stopped = patched(make, uneven="keep")
    batches = iter(stopped)
    next(batches), next(batches)
    state = loader_state(stopped, batches_done=2)
    ranks = [patched(make, rank, 3, uneven="keep") for rank in range(3)]
    restore_loader(ranks[0], state)
    assert epoch_of(ranks[0]) == [4]
    with raises(StateError, ("rank 1", "epoch 0"), "set_epoch(1)"):
        restore_loader(ranks[1], state)
    ranks[1].set_epoch(1)
    assert epoch_of(ranks[1]) == [1, 4]


@some_kinds
def test_a_count_that_does_not_start_with_the_epoch_is_refused(make: Callable[[], DataLoader[Any]]) -> None:
    loader = patched(make)
    next(iter(loader))  # a look at a batch; the loop goes on after it
    next(iter(loader))
    remedy = ("how many of its batches", "set_epoch()")
    with raises(InvalidOptionError, ("batches_done=1", "given 2", "epoch 0", "break"), remedy):
        loader_state(loader, batches_done=1)
    state = loader_state(loader, batches_done=2)
    loader.set_epoch(0)
    next(iter(loader))
    next(iter(loader))
    assert loader_state(loader, batches_done=2)["taken"] == state["taken"]


def test_a_reset_begins_with_new_workers() -> None:
    whole = patched(KINDS["ultralytics, workers"])
    epochs = [epoch_of(whole) for _ in range(3)]
    loader = patched(KINDS["ultralytics, workers"])
    assert epoch_of(loader) == epochs[0]
    loader.set_epoch(1)
    loader.reset()
    assert epoch_of(loader) == epochs[1]
    next(iter(loader))
    loader.reset()
    loader.set_epoch(2)
    assert epoch_of(loader) == epochs[2]


def test_evaluation_masks_padding_and_gathers_one_pass() -> None:
    for make in QUICK.values():
        loader = patched(make, rank=1)
        masks = [bool(real) for _, mask in iter_with_mask(loader) for real in mask]
        assert masks.count(False) == (0 if make is KINDS["whole batches"] else 1)
        alone = patched(make, ranks=1)
        rows = torch.cat(list(alone))
        assert len(gather_in_order(rows, alone)) == len(rows)


def test_evaluation_in_the_middle_of_an_epoch_is_refused() -> None:
    loader = patched(KINDS["timm"], ranks=1)
    next(iter(loader))
    with raises(UnsupportedLoaderError, ("MultiEpochs", "epoch 0", "1 batch", "break"), "set_epoch(0)"):
        list(iter_with_mask(loader))
    outputs = torch.cat(list(loader))  # goes on, and into the next epoch
    with pytest.raises(Exception, match="middle of epoch 1"):
        gather_in_order(outputs, loader)
    loader.set_epoch(0)
    assert len(list(iter_with_mask(loader))) == 6


def test_masks_of_an_unpatched_one_are_refused() -> None:
    given = KINDS["timm"]()
    with raises(UnsupportedLoaderError, ("iter_with_mask", "MultiEpochs"), "rank=0, num_replicas=1"):
        list(iter_with_mask(given))
    assert all(mask.all() for _, mask in iter_with_mask(patch_dataloader_to_ddp(given, rank=0, num_replicas=1)))


@some_kinds
def test_an_audit_approves(make: Callable[[], DataLoader[Any]]) -> None:
    assert audit(make(), 2).problems == ()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_is_raised_and_the_pass_goes_on(workers: int) -> None:
    loader = patched(lambda: MultiEpochs(Broken(0), 4, num_workers=workers))
    with pytest.raises(ValueError, match="broken"):
        next(iter(loader))
    assert next(iter(loader)).tolist() == [8, 10, 12, 14]
    with raises(StateError, ("MultiEpochs", "after an error"), "batches_done="):
        loader_state(loader)  # which would leave out what failed


class Filters(RepeatSampler):
    """It looks like a repeater, but asks on until it finds a batch that it likes."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from (batch for batch in self.sampler if len(batch) == 4)


class Backwards(RepeatSampler):
    def __iter__(self) -> Iterator[Any]:
        yield from reversed(list(self.sampler))


class Twice(RepeatSampler):
    """Ends; its name says nothing."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.sampler:
            yield from (batch, batch)

    def __len__(self) -> int:
        return 2 * len(self.sampler)


class Sized(RepeatSampler):
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("kind", [Filters, Backwards, Twice, Sized], ids=lambda kind: kind.__name__)
def test_what_does_not_just_repeat_is_no_repeater(kind: Any) -> None:
    given: Any = MultiEpochs(Indices(N), 4)
    inner = given.batch_sampler.sampler
    assert repeater_in(given) is given.batch_sampler
    object.__setattr__(given, "batch_sampler", kind(inner))
    assert repeater_in(given) is None
    assert look_at(given).iterator_in == "iterator"
