"""A patched loader counts what it hands out: where a loop stands is known without the loop's counting."""

import copy
import gc
import multiprocessing
import pickle
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import quick  # noqa: F401 - so the fork server's workers find imported what they need
import torch
from messages import raises
from repeaters import Infinite, MultiEpochs
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from zoo import Bare, Indices, as_it_is

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import InvalidOptionError, StateError

N = 23


class Stream(IterableDataset[int]):
    """Asks for no worker, so all workers read the same."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Parts(IterableDataset[int]):
    """Split over its workers, which read unequally much."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(number * 11, 11 if number + 1 < workers else N))


def of(dataset: Any = None, batch_size: int | None = 2, **options: Any) -> Callable[[], DataLoader[Any]]:
    data: Any = Indices(N) if dataset is None else dataset
    return lambda: DataLoader(data, batch_size, collate_fn=as_it_is, **options)


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": of(),
    "shuffled": of(shuffle=True),
    "last batch dropped": of(shuffle=True, drop_last=True),
    "a worker": of(shuffle=True, num_workers=1),
    "workers": of(shuffle=True, num_workers=2, prefetch_factor=4),
    "persistent workers": of(shuffle=True, num_workers=2, persistent_workers=True),
    "pickled": of(num_workers=1, multiprocessing_context="forkserver"),
    "weighted": of(sampler=WeightedRandomSampler([1.0] * N, N), num_workers=2),
    "without length": of(sampler=Bare(range(N)), num_workers=2),
    "single items": of(batch_size=None, shuffle=True),
    "whole batches": lambda: DataLoader(
        Indices(N),
        batch_sampler=ByClass(RandomSampler(range(N)), 2, drop_last=False),
        collate_fn=as_it_is,
        num_workers=2,
    ),
    "stream": of(Stream()),
    "stream of workers": of(Stream(), num_workers=2),
    "stream, persistent": of(Stream(), num_workers=2, persistent_workers=True),
    "parts": of(Parts(), num_workers=2),
    "single items of parts": of(Parts(), None, num_workers=2),
    "one iterator for all": lambda: MultiEpochs(Indices(N), 2, shuffle=True, collate_fn=as_it_is),
    "one iterator for all, workers": lambda: Infinite(Indices(N), 2, num_workers=2, collate_fn=as_it_is),
}


class ByClass(BatchSampler):
    """A batch sampler of the user's own, which is shared in whole batches."""


every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def patched(make: Callable[[], DataLoader[Any]], rank: int = 0, ranks: int = 2, **options: Any) -> Any:
    return patch_dataloader_to_ddp(make(), rank=rank, num_replicas=ranks, **{"seed": 5} | options)


def handed_out(loader: Any) -> int:
    """How many batches a state says were done, as the loop's own count would say it."""
    state = loader_state(loader)
    return next(k for k in range(99) if loader_state(loader, batches_done=k) == state)


@every_kind
def test_it_counts_as_the_loop_does(make: Callable[[], DataLoader[Any]]) -> None:
    loader = patched(make)
    assert loader_state(loader)["parts"] == [[]]
    for _ in range(2):
        for step, _ in enumerate(loader, 1):
            assert loader_state(loader) == loader_state(loader, batches_done=step)
        # After a whole pass it is at the next epoch's beginning.
        assert loader_state(loader) == loader_state(loader, batches_done=step)
    assert (loader_state(loader)["epoch"], loader_state(loader)["parts"]) == (2, [[]])


@every_kind
def test_after_a_whole_pass_ranks_with_unequal_shares_say_the_same(make: Callable[[], DataLoader[Any]]) -> None:
    states = []
    for rank in (0, 2):  # of three ranks, the last has an item, or a batch, less
        loader = patched(make, rank, 3, uneven="keep")
        for _ in loader:
            pass
        states.append(loader_state(loader))
    assert states[0] == states[1]
    assert (states[0]["epoch"], states[0]["parts"]) == (1, [[]])


# Starting workers takes long, and a later stop has more of what they fetch ahead.
@pytest.mark.parametrize(
    ("make", "stop"),
    [
        pytest.param(make, stop, id=f"{name}-{stop}")
        for name, make in KINDS.items()
        for stop in ((1, 3) if not make().num_workers else (3,))
    ],
)
def test_a_pass_that_was_left_is_resumed(make: Callable[[], DataLoader[Any]], stop: int) -> None:
    """The iterator, and its workers, are gone when the state is taken; in the pass before, nothing was counted."""
    whole = patched(make)
    epochs = [list(whole) for _ in range(3)]
    stopped, resumed = patched(make), patched(make)
    list(stopped)
    for step, _ in enumerate(stopped, 1):
        if step == stop:
            break
    restore_loader(resumed, loader_state(stopped))
    assert loader_state(resumed) == loader_state(stopped)  # restored, and not yet iterated
    assert list(resumed) == epochs[1][stop:]
    assert list(resumed) == epochs[2]
    # A resumed pass is counted from its own beginning, as a loop over it counts.
    restore_loader(resumed, loader_state(stopped))
    one = iter(resumed)
    next(one)
    assert loader_state(resumed) == loader_state(resumed, batches_done=1)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["no workers", "worker"])
def test_of_several_iterators_the_latest_pass_counts(options: Any) -> None:
    loader = patched(of(**options))
    first = iter(loader)
    list(islice(first, 3))
    second = iter(loader)
    assert next(second) == [0, 2]
    assert handed_out(loader) == 1
    list(islice(first, 2))  # it goes on beside the second
    assert handed_out(loader) == 1
    next(second)
    assert (handed_out(loader), loader_state(loader)["epoch"]) == (2, 1)


def test_before_the_first_batch_nothing_is_handed_out() -> None:
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
        loader = patched(of(shuffle=True, **options))
        for epoch in range(2):
            iterator = iter(loader)
            assert loader_state(loader)["epoch"] == epoch
            assert sum(taken for part in loader_state(loader)["parts"] for _, taken in part) == 0
            next(iterator)
            list(iterator)
            assert loader_state(loader)["epoch"] == epoch + 1


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["no workers", "worker"])
def test_a_pass_that_goes_on_after_set_epoch_still_counts(options: Any) -> None:
    """Lightning begins an epoch's workers, or fetches its first batch, and then says which epoch it is."""
    loader = patched(of(shuffle=True, **options))
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(0)
    assert loader_state(loader)["parts"] == [[]]  # so far a new pass may begin
    next(iterator)
    state = loader_state(loader)
    assert (state["epoch"], state["parts"]) == (0, [[[2, 4]]])
    loader.set_epoch(7)
    assert loader_state(loader)["epoch"] == 7
    # What was restored comes next, whatever still runs.
    restore_loader(loader, state)
    next(iterator)
    assert loader_state(loader) == state


class Broken(Indices):
    """Raises for one index."""

    def __init__(self, index: int) -> None:
        super().__init__(N)
        self.index = index

    def __getitem__(self, index: int) -> int:
        if index == self.index:
            raise ValueError("this one is broken")
        return index


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["no workers", "workers"])
def test_a_batch_that_failed_was_not_handed_out(options: Any) -> None:
    for index, before in ((0, 0), (8, 2)):
        loader = patched(of(Broken(index), **options))
        iterator = iter(loader)
        assert len(list(islice(iterator, before))) == before
        with pytest.raises(ValueError, match="broken"):
            next(iterator)
        assert loader_state(loader) == loader_state(loader, batches_done=before)
        # A loop that goes on has passed one over: what it has done is no beginning of the epoch.
        next(iterator)
        with raises(StateError, ("DataLoader", "after an error"), "batches_done="):
            loader_state(loader)
        list(iterator)
        list(patched(of(Broken(-1), **options)))
        loader.set_epoch(1)
        assert loader_state(loader)["epoch"] == 1


def test_more_than_was_handed_out_is_refused() -> None:
    loader = patched(of(num_workers=2))
    next(iter(loader))
    with raises(InvalidOptionError, ("batches_done=2", "given 1"), "batches"):
        loader_state(loader, batches_done=2)  # though the workers fetched it


class OwnIteration(DataLoader[Any]):
    """Fetches ahead."""

    def __iter__(self) -> Any:
        yield from list(super().__iter__())


class OwnIterators(DataLoader[Any]):
    """Makes iterators that are not torch's."""

    def _get_iterator(self) -> Any:
        return iter([[0], [1]] * len(list(super()._get_iterator())))


class CountsAgain(DataLoader[Any]):
    """Adds to what torch's iterators do."""

    made = 0

    def _get_iterator(self) -> Any:
        self.made += 1
        return super()._get_iterator()


class Copied(DataLoader[Any]):
    """Copies itself in a way of its own."""

    def __copy__(self) -> Any:
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone


@pytest.mark.parametrize("kind", [OwnIteration, OwnIterators, Copied])
def test_where_nobody_counts_the_loop_must(kind: Any) -> None:
    loader = patched(lambda: kind(Indices(N), 2))
    assert loader_state(loader)["parts"] == [[]]
    iterator = iter(loader)
    next(iterator)
    with raises(StateError, kind.__name__, "batches_done="):
        loader_state(loader)
    assert loader_state(loader, batches_done=1)["parts"] == [[[2, 2]]]
    list(iterator)
    loader.set_epoch(3)
    assert loader_state(loader)["epoch"] == 3


class Prefetching(DataLoader[Any]):
    """As Ray's wrapper: it has the attributes of the loader that it iterates, and fetches a batch ahead."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(loader.__dict__)
        self.inner = loader

    def __iter__(self) -> Any:
        batches = iter(self.inner)
        ahead = next(batches)
        for following in batches:
            yield ahead
            ahead = following
        yield ahead


def test_what_fetches_ahead_of_the_loop_needs_its_count() -> None:
    loader = patched(of())
    ahead: Any = Prefetching(loader)
    for step, _ in enumerate(ahead, 1):
        if step == 2:
            break
    with raises(StateError, "Prefetching", "batches_done="):
        loader_state(ahead)
    assert loader_state(ahead, batches_done=2)["parts"] == [[[2, 4]]]
    assert loader_state(loader)["parts"] == [[[2, 6]]]  # which handed out one more than the loop got


def test_a_class_that_makes_its_iterators_still_does() -> None:
    loader = patched(lambda: CountsAgain(Indices(N), 2, collate_fn=as_it_is))
    assert [len(list(loader)), loader.made] == [6, 1]
    next(iter(loader))
    assert [handed_out(loader), loader.made] == [1, 2]


def pickled(loader: Any) -> Any:
    return pickle.loads(pickle.dumps(loader))  # noqa: S301 - pickled just now


@pytest.mark.parametrize("name", ["workers", "stream", "one iterator for all, workers"])
def test_deep_copies_and_pickled_ones_count_for_themselves(name: str) -> None:
    given = patched(KINDS[name])
    running = iter(given)
    if "one iterator" in name:
        running = iter(())  # torch's cannot be copied while it is held
    else:
        next(running)
    for copied in (copy.deepcopy, pickled):
        other: Any = copied(given)
        whole = [list(other) for _ in range(2)]
        assert len(whole[0]) == len(whole[1])
        begun = loader_state(given)
        for step, _ in enumerate(other, 1):
            assert loader_state(other) == loader_state(other, batches_done=step)
            if step == 2:
                break
        assert loader_state(given) == begun
        assert type(other) is type(given)
        own = other.state_dict.__self__
        assert own is not given.state_dict.__self__
        del other
        assert own._loader() is None  # nothing but its user holds it


def test_a_shallow_copy_iterates_itself_and_is_not_counted() -> None:
    """It would get the iterators of the loader that was copied, with that one's attributes."""
    loader = patched(of())
    other = copy.copy(loader)
    vars(other)["collate_fn"] = tuple
    assert next(iter(other)) == (0, 2)
    for one in (other, loader):
        with raises(StateError, "another loader over the same sampler", "batches_done="):
            loader_state(one)
    assert not {"state_dict", "load_state_dict", "__getstate__"} & vars(other).keys()
    assert loader_state(other, batches_done=1)["parts"] == [[[2, 2]]]
    next(iter(loader))
    assert handed_out(loader) == 1
    del loader
    assert list(pickled(copy.copy(other))) == list(other)


class Slotted(DataLoader[Any]):
    __slots__ = ("note",)


def test_attributes_in_slots_are_copied_too() -> None:
    given = Slotted(Indices(N), 2)
    given.note = "kept"
    for other in (copy.copy, copy.deepcopy):
        assert other(patched(lambda: given)).note == "kept"


def workers() -> int:
    return len(multiprocessing.active_children())


@pytest.mark.parametrize("name", [name for name in KINDS if name != "pickled"])
def test_no_cycle_keeps_a_loader_or_its_workers_alive(name: str) -> None:
    gc.collect()  # which may end workers of other tests
    before = workers()
    loader = patched(KINDS[name])
    gc.disable()
    try:
        for _ in loader:
            break
        keeps = "persistent" in name or "one iterator" in name
        if not keeps:
            assert workers() == before  # they end with the break
        alive, loader = weakref.ref(loader), None
        assert alive() is None
        assert workers() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [{}, {"num_workers": 1}], ids=["no workers", "worker"])
def test_a_running_iterator_counts_as_torchs_and_outlives_its_loader(kind: Any) -> None:
    plain: Any = iter(of(**kind)())
    loader = patched(of(**kind))
    counted = iter(loader)
    assert isinstance(counted, type(plain))
    del loader
    assert len(list(counted)) == 6


def test_batches_of_a_closed_world_by_worker_are_counted() -> None:
    loader = patched(of(Parts(), num_workers=2), share="by_worker", uneven="keep")
    for step, _ in enumerate(loader, 1):
        assert loader_state(loader) == loader_state(loader, batches_done=step)


def test_nothing_is_counted_in_workers() -> None:
    """A loader is not sent to them, nor what counts."""
    given = of(num_workers=1, multiprocessing_context="spawn", worker_init_fn=no_methods)()
    assert len(list(patched(lambda: given))) == 6


def no_methods(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert not hasattr(info.dataset, "state_dict")
