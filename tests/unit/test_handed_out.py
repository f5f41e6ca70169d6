"""A patched loader counts what it hands out, and tells where it stands as torch's Stateful protocol has it."""

import copy
import gc
import json
import multiprocessing
import pickle
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import quick  # noqa: F401 - so the fork server's workers find imported what they need
from messages import raises
from resumed import RESUMED, of
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from zoo import Broken, Indices, N, Source, as_it_is, out_of_order

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import CannotResumeWarning, StateError
from ddp_patch.streams import stream_passes

BY_NAME = {kind.name: kind.make for kind in RESUMED}


def patched(make: Callable[[], DataLoader[Any]], rank: int = 0, ranks: int = 2, **options: Any) -> Any:
    return patch_dataloader_to_ddp(make(), rank=rank, num_replicas=ranks, **{"seed": 5} | options)


def handed_out(loader: Any) -> int:
    """How many batches a state says were done, as the loop's own count would say it."""
    state = loader_state(loader)
    return next(k for k in range(99) if loader_state(loader, batches_done=k) == state)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["no workers", "worker"])
def test_of_several_iterators_the_latest_pass_counts(options: Any) -> None:
    loader = patched(of(**options))
    first = iter(loader)
    assert isinstance(first, type(iter(of(**options)())))
    list(islice(first, 3))
    second = iter(loader)
    assert next(second) == [0, 2]
    assert handed_out(loader) == 1
    list(islice(first, 2))  # it goes on beside the second
    assert handed_out(loader) == 1
    next(second)
    assert (handed_out(loader), loader_state(loader)["epoch"]) == (2, 1)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["no workers", "worker"])
def test_a_pass_that_goes_on_after_set_epoch_still_counts(options: Any) -> None:
    """Lightning begins an epoch's workers, or fetches its first batch, and then says which epoch it is."""
    loader = patched(of(shuffle=True, **options))
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(0)
    assert loader_state(loader)["taken"] == []  # so far a new pass may begin
    next(iterator)
    state = loader_state(loader)
    assert (state["epoch"], state["taken"]) == (0, [8])
    loader.set_epoch(7)
    assert loader_state(loader)["epoch"] == 7
    # What was restored comes next, whatever still runs.
    restore_loader(loader, state)
    next(iterator)
    assert loader_state(loader) == state


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


class OwnIteration(DataLoader[Any]):
    """Fetches ahead."""

    def __iter__(self) -> Any:
        yield from list(super().__iter__())


class OwnIterators(DataLoader[Any]):
    """Makes iterators that are not torch's."""

    def _get_iterator(self) -> Any:
        return iter([[0], [1]] * len(list(super()._get_iterator())))


class Copied(DataLoader[Any]):
    """Copies itself in a way of its own."""

    def __copy__(self) -> Any:
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone


@pytest.mark.parametrize("kind", [OwnIteration, OwnIterators, Copied])
def test_where_nobody_counts_the_loop_must(kind: Any) -> None:
    loader = patched(lambda: kind(Indices(N), 2))
    assert loader_state(loader)["taken"] == []
    iterator = iter(loader)
    next(iterator)
    with raises(StateError, kind.__name__, "batches_done="):
        loader_state(loader)
    assert loader_state(loader, batches_done=1)["taken"] == [4]
    list(iterator)
    loader.set_epoch(3)
    assert loader_state(loader)["epoch"] == 3


def pickled(loader: Any) -> Any:
    return pickle.loads(pickle.dumps(loader))  # noqa: S301 - pickled just now


@pytest.mark.parametrize("name", ["workers", "stream, persistent", "one iterator for all, workers"])
def test_deep_copies_and_pickled_ones_count_for_themselves(name: str) -> None:
    given = patched(BY_NAME[name])
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
    assert loader_state(other, batches_done=1)["taken"] == [4]
    next(iter(loader))
    assert handed_out(loader) == 1
    del loader
    assert list(pickled(copy.copy(other))) == list(other)


# One of each way to keep an iterator, or workers.
KEPT = ["single items", "workers", "stream, persistent", "parts", "one iterator for all, workers"]


def workers() -> int:
    return len(multiprocessing.active_children())


@pytest.mark.parametrize("name", KEPT)
def test_no_cycle_keeps_a_loader_or_its_workers_alive(name: str) -> None:
    gc.collect()  # which may end workers of other tests
    before = workers()
    loader = patched(BY_NAME[name])
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


# torch's Stateful protocol, by which frameworks save and restore a loader's place.


def follows_the_protocol(loader: object) -> bool:
    from torch.distributed.checkpoint.stateful import Stateful  # which imports much: see tests/frozen.py

    return isinstance(loader, Stateful)


def refusal(loader: Any) -> str:
    """Why a state cannot be told; and that it cannot be loaded."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        state = json.loads(json.dumps(loader.state_dict()))
        loader.state_dict()
    why = state["cannot_resume"]
    assert [why in str(one.message) for one in warned if one.category is CannotResumeWarning] in ([True], [])
    assert state.keys() == loader_state(patched(of(Source()))).keys()
    for restore in (loader.load_state_dict, lambda state: restore_loader(loader, state)):
        with pytest.raises(StateError, match=re.escape(why)):
            restore(state)
    return str(why)


def test_a_checkpoint_can_be_taken_of_what_cannot_be_resumed() -> None:
    unsized = patched(of(Source()))
    iterator = iter(unsized)
    assert "version" in unsized.state_dict()
    next(iterator)
    assert unsized.state_dict() == loader_state(unsized)  # what the loop was given, also where nobody knows the end
    assert loader_state(unsized)["taken"] == [4]
    list(iterator)
    assert unsized.state_dict()["turn"] is None

    class Holds(Source):
        def __init__(self) -> None:
            super().__init__()
            self.generator = np.random.default_rng(0)

    assert "random generator" in refusal(patched(of(Holds(), num_workers=1, persistent_workers=True)))
    one_shot = patched(of(sampler=iter(range(N))), uneven="keep")
    list(one_shot)
    assert "iterator" in refusal(one_shot)


@pytest.mark.parametrize(
    "make",
    [lambda: out_of_order(of(num_workers=1)()), lambda: OwnIteration(Indices(N), 2)],
    ids=["not in order", "own iteration"],
)
def test_whose_place_is_never_known_does_not_claim_to_tell_it(make: Callable[[], Any]) -> None:
    """So a framework warns by itself, as Lightning does."""
    loader = patched(make)
    assert not follows_the_protocol(loader)
    assert len(list(loader)) == 6


class OwnState(DataLoader[Any]):
    """Tells its place in a way of its own."""

    def state_dict(self) -> Any:
        return "its own"


def test_a_state_of_the_loaders_own_stays() -> None:
    loader = patched(lambda: OwnState(Indices(N), 2, collate_fn=as_it_is))
    assert loader.state_dict() == "its own"
    assert not hasattr(loader, "load_state_dict")
    next(iter(loader))
    assert loader_state(loader)["taken"] == [4]


class EndsLater(IterableDataset[int]):
    """Knows its length, and is read in parts. The last worker ends its part when it is told to."""

    def __init__(self) -> None:
        self.may_end = multiprocessing.Event()
        self.may_end.set()

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(number, 24, workers)
        if number == workers - 1:
            self.may_end.wait(60)


def test_the_last_batch_is_not_followed_by_a_rest_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework that counts as many batches as len() says would take a rest of no batches for the next epoch."""
    dataset = EndsLater()
    dataset.may_end.clear()
    loader = patched(of(dataset, num_workers=2))
    iterator = iter(loader)
    list(islice(iterator, 5))
    assert loader.state_dict() == loader_state(loader)
    next(iterator)
    with monkeypatch.context() as patch:
        patch.setattr(stream_passes, "_ENDS_S", 0.01)
        with pytest.warns(CannotResumeWarning, match="6 batches"):
            loader.state_dict()  # a worker has not said that it came to its end
    threading.Timer(0.2, dataset.may_end.set).start()
    assert loader.state_dict()["turn"] is None  # it waited
    assert loader_state(loader)["turn"] == 0  # as every rank says it, whatever it knows
    resumed = patched(of(dataset, num_workers=2))
    resumed.load_state_dict(loader.state_dict())
    assert [len(list(resumed)) for _ in range(2)] == [0, 6]
