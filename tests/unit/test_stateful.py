"""A patched loader follows torch's Stateful protocol, by which frameworks save and restore its place."""

import json
import multiprocessing
import re
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repeaters import MultiEpochs
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info
from zoo import Indices, as_it_is, out_of_order

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import StateError
from ddp_patch.streams import stream_source

N = 24


class Stream(IterableDataset[int]):
    """Without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Parts(IterableDataset[int]):
    """Knows its length, and is read in parts. The last worker ends its part when it is told to."""

    def __init__(self) -> None:
        self.may_end = multiprocessing.Event()
        self.may_end.set()

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(number, N, workers)
        if number == workers - 1:
            self.may_end.wait(60)


class ByClass(BatchSampler):
    """A batch sampler of the user's own."""


class OwnState(DataLoader[Any]):
    """Tells its place in a way of its own."""

    def state_dict(self) -> Any:
        return "its own"


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def of(dataset: Any = None, **options: Any) -> Callable[[], DataLoader[Any]]:
    data: Any = Indices(N) if dataset is None else dataset
    return lambda: DataLoader(data, 2, collate_fn=as_it_is, **options)


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": of(shuffle=True),
    "workers": of(shuffle=True, num_workers=2),
    "persistent workers": of(shuffle=True, num_workers=2, persistent_workers=True),
    "whole batches": lambda: DataLoader(
        Indices(N), batch_sampler=ByClass(RandomSampler(range(N)), 2, drop_last=False), collate_fn=as_it_is
    ),
    "stream that knows its length": of(Parts()),
    "parts": of(Parts(), num_workers=2),
    "one iterator for all": lambda: MultiEpochs(Indices(N), 2, shuffle=True, collate_fn=as_it_is),
}


def patched(make: Callable[[], DataLoader[Any]], **options: Any) -> Any:
    return patch_dataloader_to_ddp(make(), **{"rank": 0, "num_replicas": 2, "seed": 5} | options)


def follows_the_protocol(loader: object) -> bool:
    from torch.distributed.checkpoint.stateful import Stateful  # which imports much: see tests/frozen.py

    return isinstance(loader, Stateful)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("stop", [0, 1, 5, 6])
def test_its_place_is_saved_and_restored(make: Callable[[], DataLoader[Any]], stop: int) -> None:
    whole, stopped, resumed = patched(make), patched(make), patched(make)
    stream = [batch for _ in range(3) for batch in whole]
    assert isinstance(make(), type(resumed))
    assert follows_the_protocol(resumed)
    running = iter(stopped)
    list(islice(running, stop))
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert len(resumed) == len(whole) == 6  # callers count from the epoch's beginning
    rest = [batch for _ in range(2) for batch in resumed]
    most = 12 if stop == 6 or make is KINDS["one iterator for all"] else 12 - stop
    assert rest == stream[stop : stop + most]


@pytest.mark.filterwarnings("ignore:torch.distributed is ")  # one process is meant
def test_loaders_in_a_distributed_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    running, again = patched(of(shuffle=True)), patched(of(shuffle=True))
    left = iter(running)
    list(islice(left, 2))
    save({"loader": running}, checkpoint_id=tmp_path)
    load({"loader": again}, checkpoint_id=tmp_path)
    assert list(again) == list(left)


def refusal(loader: Any) -> str:
    """Why a state cannot be told; and that it cannot be loaded."""
    state = json.loads(json.dumps(loader.state_dict()))
    (why,) = state.values()
    for restore in (loader.load_state_dict, lambda state: restore_loader(loader, state)):
        with pytest.raises(StateError, match=re.escape(why)):
            restore(state)
    return str(why)


def test_a_checkpoint_can_be_taken_of_what_cannot_be_resumed() -> None:
    unsized = patched(of(Stream()))
    iterator = iter(unsized)
    assert "version" in unsized.state_dict()
    next(iterator)
    assert "has no len()" in refusal(unsized)
    assert loader_state(unsized)["parts"] == [[[2, 2]]]  # which a loop of the user's own may rely on
    list(iterator)
    assert unsized.state_dict()["epoch"] == 1  # nobody can be ahead of the end

    class Holds(Stream):
        def __init__(self) -> None:
            self.generator = np.random.default_rng(0)

    assert "random generator" in refusal(patched(of(Holds(), num_workers=1, persistent_workers=True)))
    one_shot = patched(of(sampler=iter(range(N))), uneven="keep")
    list(one_shot)
    assert "iterator" in refusal(one_shot)


class Backwards(DataLoader[Any]):
    """Makes other iterators than torch's."""

    def _get_iterator(self) -> Any:
        return iter(list(super()._get_iterator()))


def test_what_nobody_counts_cannot_be_resumed() -> None:
    loader = patched(lambda: Backwards(Indices(N), 2))
    next(iter(loader))
    assert "Backwards" in refusal(loader)


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


def test_a_state_of_the_loaders_own_stays() -> None:
    loader = patched(lambda: OwnState(Indices(N), 2, collate_fn=as_it_is))
    assert loader.state_dict() == "its own"
    assert not hasattr(loader, "load_state_dict")
    next(iter(loader))
    assert loader_state(loader)["parts"] == [[[2, 2]]]


def test_the_last_batch_is_not_followed_by_a_rest_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework that counts as many batches as len() says would take a rest of no batches for the next epoch."""
    dataset = Parts()
    dataset.may_end.clear()
    loader = patched(of(dataset, num_workers=2))
    iterator = iter(loader)
    list(islice(iterator, 5))
    assert loader.state_dict() == loader_state(loader)
    next(iterator)
    with monkeypatch.context() as patch:
        patch.setattr(stream_source, "_ENDS_S", 0.01)
        assert "6 batches" in refusal_of_now(loader)  # a worker has not said that it came to its end
    threading.Timer(0.2, dataset.may_end.set).start()
    assert loader.state_dict()["epoch"] == 1  # it waited
    assert loader_state(loader)["epoch"] == 0  # as every rank says it, whatever it knows
    resumed = patched(of(dataset, num_workers=2))
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 6


def refusal_of_now(loader: Any) -> str:
    (why,) = loader.state_dict().values()
    return str(why)
