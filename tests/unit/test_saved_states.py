"""A state goes through every format unchanged; and whoever saves one at an odd moment saves the right one."""

import io
import json
import os
import signal
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import raises
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import CannotResumeWarning, RankMismatchError, StateError
from ddp_patch.sharding.values_as_text import as_text, from_text
from ddp_patch.testing import run_ranks

N = 24
dcp: Any = import_module("torch.distributed.checkpoint")  # which declares nothing that it exports


class Text(IterableDataset[int]):
    """Reads on from its own state, which is nested."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"file": {"at": self.at, "none": {}, 7: (self.at, [])}, "tokens": torch.arange(self.at), "words": b"a"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["file"][7] == (len(state["tokens"]), [])
        assert (state["file"]["none"], state["words"]) == ({}, b"a")
        self.at = state["file"]["at"]

    def __iter__(self) -> Iterator[int]:
        while self.at < N:
            self.at += 1
            yield self.at - 1
        self.at = 0


class Turned(Sampler[int]):
    """Has a nested state, with numbers as names."""

    def __init__(self) -> None:
        self.turns: dict[int, Any] = {0: (1, 2)}

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns, "weights": np.arange(3.0), "empty": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["weights"].tolist() == [0, 1, 2]
        self.turns = state["turns"]

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.turns[len(self.turns)] = (len(self.turns),)
        yield from torch.randperm(N).tolist()


NUMBERS: Any = range(N)
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(NUMBERS, 2, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "sampler with a state": lambda: DataLoader(NUMBERS, 2, sampler=Turned()),
    "stream": lambda: DataLoader(Text(), 2),
    "stream, workers": lambda: DataLoader(Text(), 2, num_workers=2),
}


def patched(make: Callable[[], DataLoader[Any]]) -> Any:
    return patch_dataloader_to_ddp(make(), rank=0, num_replicas=2, seed=5)


def by_torch(state: Any, folder: Path) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_dcp(state: Any, folder: Path, *, waits: bool = False, key: str = "loader") -> Any:
    with warnings.catch_warnings(action="ignore"):
        if waits:
            dcp.async_save({key: state}, checkpoint_id=folder).result()
        else:
            dcp.save({key: state}, checkpoint_id=folder)
        other = patched(LOADERS["shuffled"])
        there = {key: other.state_dict()}
        dcp.load(there, checkpoint_id=folder)
    return there[key]


FORMATS: dict[str, Callable[[Any, Path], Any]] = {
    "torch": by_torch,
    "json": lambda state, _: json.loads(json.dumps(state)),
    "dcp": by_dcp,
    "dcp, for each rank": partial(by_dcp, key="dp_rank_0"),
}


def states_of(make: Callable[[], DataLoader[Any]]) -> list[tuple[Any, list[Any]]]:
    """States before, within and after an epoch, and what comes after each."""
    whole, running = patched(make), patched(make)
    epochs = [[batch.tolist() for batch in whole] for _ in range(2)]
    found = [(running.state_dict(), epochs)]
    for step, _ in enumerate(running, 1):
        if step in (1, 3):
            found.append((running.state_dict(), [epochs[0][step:], epochs[1]]))
    return [*found, (running.state_dict(), [[], epochs[1]])]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("how", FORMATS)
def test_a_state_that_any_format_gives_back_is_resumed(name: str, how: str, tmp_path: Path) -> None:
    for place, (state, expected) in enumerate(states_of(LOADERS[name])):
        back = FORMATS[how](state, tmp_path / str(place))
        assert back == state
        assert {type(value) for value in back.values()} <= {int, str, list, type(None)}
        resumed = patched(LOADERS[name])
        resumed.load_state_dict(back)
        assert [[batch.tolist() for batch in resumed] for _ in expected] == expected


def _saves_and_loads(rank: int, world_size: int, folder: str) -> list[int]:
    def made() -> dict[str, Any]:
        loaders = {"map": DataLoader(NUMBERS, 2, shuffle=True), "stream": DataLoader(Text(), 2, num_workers=1)}
        return {name: patch_dataloader_to_ddp(loader, seed=5, timeout=60) for name, loader in loaders.items()}

    running, seen = made(), list[int]()
    for step, batches in enumerate(zip(*running.values(), strict=True), 1):
        if step <= 2:
            seen += [number for batch in batches for number in batch.tolist()]
        if step == 2:
            saving = dcp.async_save(running, checkpoint_id=folder)
        if step == 4:  # trained on while it is saved
            break
    saving.result()
    resumed = made()
    dcp.load(resumed, checkpoint_id=folder)
    for loader in resumed.values():
        seen += [number for batch in loader for number in batch.tolist()]
    return seen


def test_two_loaders_are_saved_while_training_goes_on_and_loaded_by_all_ranks(tmp_path: Path) -> None:
    seen = run_ranks(_saves_and_loads, 2, str(tmp_path), timeout=300)
    assert Counter(number for rank in seen for number in rank) == Counter([*range(N)] * 2)


def test_what_cannot_be_resumed_warns_once_and_every_format_loads_the_reason(tmp_path: Path) -> None:
    def made() -> Any:
        return patched(lambda: DataLoader(NUMBERS, 2, sampler=iter(range(N))))

    loader = made()
    list(loader)
    with pytest.warns(CannotResumeWarning, match="cannot resume: .*the sampler is an iterator") as warned:
        states = [loader.state_dict() for _ in range(3)]
    assert len(warned) == 1
    other = patched(LOADERS["stream"])
    assert states[0].keys() == other.state_dict().keys()
    resumed = made()
    for place, load in enumerate(FORMATS.values()):
        with pytest.raises(StateError, match="the sampler is an iterator"):
            resumed.load_state_dict(load(states[0], tmp_path / str(place)))


class Odd(Turned):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": [1, Counter("a")]}


def test_a_samplers_state_that_is_no_plain_value_is_refused_with_its_class() -> None:
    with raises(StateError, ("state_dict()", "a Counter"), "lists, tuples, sets and dicts"):
        loader_state(patched(lambda: DataLoader(NUMBERS, 2, sampler=Odd())))


def test_values_come_back_from_text_as_they_were() -> None:
    values = [
        {"a": 1, "!tuple": [1]},
        {1: {2.5, "b"}, None: frozenset({True})},
        OrderedDict([("z", float("inf")), ("a", 2**200)]),
        (b"\x00", (), [], {}, ""),
        [[1, "2"], (3, [None])],
    ]
    assert from_text(as_text(values)) == values
    assert [type(value) for value in from_text(as_text(values))] == [*map(type, values)]
    for tensor in (torch.arange(6).view(2, 3).T, torch.empty(0, 2), torch.tensor(1.5, dtype=torch.bfloat16)):
        again = from_text(as_text(tensor))
        assert (again.dtype, again.tolist()) == (tensor.dtype, tensor.tolist())
    for array in (np.float32(1.5), np.arange(6, dtype=">i2").reshape(2, 3), np.array(["ab", "c"])):
        again = from_text(as_text(array))
        assert (type(again), again.dtype, again.tolist()) == (type(array), array.dtype, array.tolist())
    for value in (object(), Counter(), np.array([object()])):
        with pytest.raises(TypeError):
            as_text([value])


# Moments at which a pass has only half begun.


class Asks(Dataset[int]):
    def __init__(self, ask: Callable[[], None]) -> None:
        self.ask = ask

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        self.ask()
        return index


class AskingStream(IterableDataset[int]):
    def __init__(self, ask: Callable[[], None]) -> None:
        self.ask = ask

    def __iter__(self) -> Iterator[int]:
        self.ask()
        yield from range(N)


class AskingSampler(Sampler[int]):
    """Is asked when it has drawn already."""

    def __init__(self, ask: Callable[[], None], lazily: bool) -> None:
        self.ask, self.lazily, self.generator = ask, lazily, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(N, generator=self.generator).tolist()
        if self.lazily:
            return self._asking(order)
        self.ask()
        return iter(order)

    def _asking(self, order: list[int]) -> Iterator[int]:
        self.ask()
        yield from order


def collated(ask: Callable[[], None], numbers: list[int]) -> torch.Tensor:
    ask()
    return torch.tensor(numbers)


def by_signal(ask: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        before = signal.signal(signal.SIGUSR1, lambda *_: ask())
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)

    return act


def by_itself(ask: Callable[[], None]) -> Callable[[], None]:
    return ask


def by_thread(ask: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    return act


MOMENTS: dict[str, Callable[[Callable[[], None]], DataLoader[Any]]] = {
    "dataset": lambda ask: DataLoader(Asks(ask), 2, shuffle=True),
    "stream": lambda ask: DataLoader(AskingStream(ask), 2),
    "sampler": lambda ask: DataLoader(NUMBERS, 2, sampler=AskingSampler(ask, lazily=False)),
    "sampler, lazily": lambda ask: DataLoader(NUMBERS, 2, sampler=AskingSampler(ask, lazily=True)),
    "collate_fn": lambda ask: DataLoader(NUMBERS, 2, shuffle=True, collate_fn=partial(collated, ask)),
}


# A thread waits while samplers and streams are read.
ASKED = [(moment, way) for moment in MOMENTS for way in (by_itself, by_signal)]
ASKED += [("dataset", by_thread), ("collate_fn", by_thread)]


@pytest.mark.parametrize(("moment", "way"), ASKED)
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_state_while_the_first_batch_is_made_has_no_batch(moment: str, way: Any, epoch: int) -> None:
    states: list[Any] = []
    asks = False

    def ask() -> None:
        if asks and not states:
            states.append(loader_state(loader))

    quiet = patched(lambda: MOMENTS[moment](lambda: None))
    epochs = [[batch.tolist() for batch in quiet] for _ in range(epoch + 1)]
    loader = patched(lambda: MOMENTS[moment](way(ask)))
    for _ in range(epoch):
        list(loader)
    asks = True
    assert next(iter(loader)).tolist() == epochs[epoch][0]
    resumed = patched(lambda: MOMENTS[moment](lambda: None))
    restore_loader(resumed, states[0])
    rest = [batch.tolist() for batch in resumed] or [batch.tolist() for batch in resumed]
    assert rest == epochs[epoch]


def test_a_state_while_workers_are_started_has_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    start, states = torch.multiprocessing.Process.start, list[Any]()

    def start_and_ask(process: Any) -> None:
        start(process)
        states.append(loader_state(loader))

    loader = patched(lambda: DataLoader(NUMBERS, 2, num_workers=2))
    with monkeypatch.context() as context, suppress(StopIteration):
        context.setattr(torch.multiprocessing.Process, "start", start_and_ask)
        iterator = iter(loader)
    states.append(loader_state(loader))
    assert [sum(state["taken"]) for state in states] == [0, 0, 0]
    assert next(iterator).tolist() == [0, 2]


def _restores_another(rank: int, world_size: int) -> str:
    def made() -> Any:
        return patch_dataloader_to_ddp(DataLoader(NUMBERS, 2), timeout=60)

    running = made()
    iterator = iter(running)
    states = [running.state_dict() for _ in iterator]
    with pytest.raises(RankMismatchError) as raised:
        restore_loader(made(), states[2 + rank])
    with pytest.raises(RankMismatchError) as at_the_end:
        restore_loader(made(), states[-1 - rank])
    return f"{raised.value} {at_the_end.value}"


def test_ranks_that_restore_states_of_other_steps_are_told_which() -> None:
    for told in run_ranks(_restores_another, 2, timeout=300):
        assert "steps made in it: 3 on rank 0; 4 on rank 1" in told
        assert "items taken of it: 12 on rank 0; 16 on rank 1" in told
        assert "items taken of it: all on rank 0; 20 on rank 1" in told
