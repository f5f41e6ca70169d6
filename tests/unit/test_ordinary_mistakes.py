"""Ordinary mistakes: each is told in at most six lines of a terminal, with a remedy that works as it is written."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from zoo import Source

from ddp_patch import (
    DDPBatchSamplerWrapper,
    DDPSamplerWrapper,
    autopatch,
    loader_state,
    patch_dataloader_to_ddp,
    testing,
)
from ddp_patch.errors import InvalidOptionError, NotALoaderError, RanksFailedError, StateError
from ddp_patch.resume import restore_loader

COLUMNS, LINES = 120, 6
HERE: dict[str, Any] = {"rank": 0, "num_replicas": 2}


def lines_of(text: str) -> list[str]:
    return [part for line in text.splitlines() for part in textwrap.wrap(line, COLUMNS) or [""]]


def told(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert len(lines_of(message)) <= LINES, message
    return message


def patched(**options: Any) -> Any:
    return patch_dataloader_to_ddp(DataLoader(range(20), 2), **HERE, **options)  # type: ignore[arg-type]  # a dataset


# ---- keywords ----


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"shuffle": True}, "set it on the DataLoader, as in DataLoader(..., shuffle=True)"),
        ({"drop_last": True}, "set it on the DataLoader, as in DataLoader(..., drop_last=True)"),
        ({"batch_size": 4}, "set it on the DataLoader, as in DataLoader(..., batch_size=4)"),
        ({"unevn": "drop"}, "did you mean uneven? Pass uneven=."),
        ({"world_size": 2}, "use these: num_replicas, rank, process_group, device_mesh, uneven,"),
    ],
)
def test_a_keyword_that_does_not_exist(given: dict[str, Any], remedy: str) -> None:
    (name,) = given

    def of_autopatch() -> None:
        with autopatch(**HERE, **given):
            pass

    calls: dict[str, Callable[[], Any]] = {
        "patch_dataloader_to_ddp": lambda: patched(**given),
        "DDPSamplerWrapper": lambda: DDPSamplerWrapper(range(20), **HERE, **given),
        "DDPBatchSamplerWrapper": lambda: DDPBatchSamplerWrapper([[0]], **HERE, **given),
        "autopatch": of_autopatch,
    }
    for called, call in calls.items():
        assert told(TypeError, call).startswith(f"{called}() has no option {name}: {remedy}")
    if remedy.startswith("set it"):
        loader: Any = DataLoader(range(20), **given)  # type: ignore[arg-type]  # a dataset
        assert len(list(patch_dataloader_to_ddp(loader, **HERE))) == 10 // given.get("batch_size", 1) + (
            "batch_size" in given
        )
    elif remedy.startswith("did you"):
        assert len(patched(uneven="drop")) == 5


# ---- states ----


class Counting:
    """A sampler with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        self.count += 1
        return iter(range(40))

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"] + 0


def of_stream() -> Any:
    return patch_dataloader_to_ddp(DataLoader(Source(40), 5), **HERE)


def of_sampler() -> Any:
    loader: Any = DataLoader(range(40), 5, sampler=Counting())  # type: ignore[arg-type]  # a dataset
    return patch_dataloader_to_ddp(loader, **HERE)


def nested(depth: int) -> list[Any]:
    nest: list[Any] = []
    for _ in range(depth):
        nest = [nest]
    return nest


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


JUNK = {
    "text": "y" * 10**6,
    "bytes": b"x" * 10**6,
    "2**63": 2**63,
    "digits": 10**5000,
    "nest": nested(10**5),
    "array": np.zeros((4, 4)),
    "dict": dict.fromkeys(range(10**4), "z" * 10),
    "object": Unprintable(),
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from paths(part, (*path, key))


def put(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    new = value.copy()
    new[path[0]] = put(value[path[0]], path[1:], junk)
    return new


@pytest.mark.parametrize("make", [of_stream, of_sampler])
def test_a_state_with_junk_anywhere_is_refused_in_a_few_lines(make: Any) -> None:
    """Except where any value may stand: a seed, a sampler's own, and the hashes of a stream's first items."""
    loader = make()
    next(iter(loader))
    state = loader_state(loader)
    free = {("seed",), ("states", "samplers", 0, "count"), *((("states", "streams", 0, 0, place)) for place in (1, 2))}
    wrong = []
    for path in paths(state):
        for name, junk in JUNK.items():
            here = make()
            try:
                restore_loader(here, put(state, path, junk))
            except StateError as error:
                if len(lines_of(str(error))) > 6 or len(str(error)) > 1500:
                    wrong.append((path, name, str(error)[:500]))
                continue
            if path not in free and path[:3] != ("states", "streams", 0):
                wrong.append((path, name, "accepted"))
    assert not wrong
    restore_loader(here, state)  # none of them has changed it
    assert [int(item) for batch in here for item in batch] == list(range(10, 40, 2))


def test_a_seed_that_is_no_number_is_damaged() -> None:
    """The remedy is not to pass it: that is refused."""
    state = loader_state(loader := of_stream())
    message = told(StateError, lambda: restore_loader(loader, {**state, "seed": True}))
    assert "its field seed is True" in message
    assert "seed=True" not in message


@pytest.mark.parametrize("junk", [junk for name, junk in JUNK.items() if name != "dict"], ids=lambda junk: type(junk))
def test_a_state_that_is_none(junk: Any) -> None:
    assert "damaged: it is " in told(StateError, lambda: restore_loader(of_stream(), junk))


# ---- what other packages have ----


def test_a_loader_of_torchdatas_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/integrations/test_torchdata.py`` tries the remedy."""
    module = ModuleType("torchdata.nodes.loader")
    exec("class Loader: pass", vars(module))  # noqa: S102 - a class of that module
    given: Any = module.Loader()
    message = told(NotALoaderError, lambda: patch_dataloader_to_ddp(given, **HERE))
    assert "torchdata.nodes.loader.Loader" in message
    assert "an IterableDataset whose __iter__ returns iter(loader)" in message


def test_a_dataset_of_energon_by_worker() -> None:
    kind = type("SavableDatasetWrapper", (Source,), {"__module__": "megatron.energon.savable_loader"})

    def of_energon(**options: Any) -> Any:
        return patch_dataloader_to_ddp(DataLoader(kind(40), 5), **HERE, **options)

    message = told(InvalidOptionError, lambda: of_energon(share="by_worker", uneven="keep"))
    assert "Megatron-Energon's SavableDatasetWrapper" in message
    assert "Leave share out" in message
    assert len(list(of_energon())) == 4


# ---- on real ranks ----


def fails(rank: int, world_size: int) -> None:
    raise LookupError(f"rank {rank} of {world_size} has no data")


_RAISED = '    raise LookupError(f"rank {rank} of {world_size} has no data")'


def test_ranks_that_fail_alike_are_told_once() -> None:
    with pytest.raises(RanksFailedError) as caught:
        testing.run_ranks(fails, 3)
    message = str(caught.value)
    first, header, place, line, error, last = message.splitlines()
    assert first == "fails failed on 3 ranks: ranks 0 to 2 raised. Correct what the ranks report."
    assert (header, line) == ("Traceback (most recent call last):", _RAISED)
    assert error == "LookupError: rank 0 of 3 has no data"
    assert "test_ordinary_mistakes.py" in place
    assert last.endswith("explain RanksFailedError")


def test_pytest_shows_the_line_that_called_run_ranks_and_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from ddp_patch.testing import run_ranks\n"
        "def fails(rank, world_size):\n    raise LookupError('no data')\n"
        "def test_it():\n    run_ranks(fails, 1)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    assert "run_ranks(fails, 1)" in ended.stdout
    assert "LookupError: no data" in ended.stdout
    assert "_check_how" not in ended.stdout
