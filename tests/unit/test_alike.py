"""What the world gives a script is alike on all ranks: the same program, run as rank 0 and then as a later rank."""

import copy
import glob
import os
import random
import secrets
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ddp_patch.running.alike import alike, asked, asking_alone, folders_sorted
from ddp_patch.running.overlay import entries_of


def on_ranks(*programs: Callable[[], Any]) -> list[Any]:
    """Return what programs return: that of rank 0, which is done before the others begin, and theirs."""
    told: list[str] = []
    found = []
    for program in programs:
        replayed = iter([*told])

        def of_rank_0(find: Callable[[], str], is_first: bool = not told, replayed: Iterator[str] = replayed) -> str:
            if is_first:
                told.append(find())
            return told[-1] if is_first else next(replayed)

        np.random.seed(0)  # numpy's seed() without a number leaves the place in the state
        with alike(of_rank_0):
            found.append(program())
    return found


def seeded(seed: Callable[[], Any], draw: Callable[[], Any]) -> Any:
    seed()
    return draw()


# How programs ask for the system's entropy.
DRAWS: dict[str, Callable[[], Any]] = {
    "os.urandom": lambda: os.urandom(9),
    "os.getrandom": lambda: os.getrandom(9),
    "secrets": lambda: (secrets.token_hex(), secrets.randbelow(10**9), secrets.token_bytes(9)),
    "SystemRandom": lambda: (random.SystemRandom().random(), random.SystemRandom().randrange(10**9)),
    "random.seed()": lambda: seeded(random.seed, random.random),
    "random.Random()": lambda: random.Random().random(),
    "uuid4": lambda: uuid.uuid4().hex,
    "default_rng()": lambda: np.random.default_rng().random(),
    "SeedSequence()": lambda: np.random.SeedSequence().entropy,
    "RandomState()": lambda: np.random.RandomState().rand(),
    "np.random.seed(None)": lambda: seeded(np.random.seed, np.random.rand),
    "torch.seed()": lambda: (torch.seed(), torch.initial_seed(), torch.rand(1).item()),
    "torch.random.seed()": lambda: (torch.random.seed(), torch.rand(1).item()),
    "tempfile": lambda: os.path.basename(tempfile.mktemp()),  # noqa: S306 - its name alone
}


@pytest.fixture(autouse=True)
def _global_generators_stay() -> Iterator[None]:
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)


@pytest.mark.parametrize("name", DRAWS)
def test_what_nobody_has_seeded_is_the_same_on_every_rank_and_new_in_each_run(name: str) -> None:
    def draws_twice() -> list[Any]:
        return [DRAWS[name](), DRAWS[name]()]

    first, second = on_ranks(draws_twice, draws_twice)
    assert first == second
    assert first[0] != first[1]
    assert on_ranks(draws_twice)[0][0] not in first
    assert DRAWS[name]() not in first  # afterwards


def test_what_is_seeded_draws_as_ever() -> None:
    def draws() -> tuple[float, ...]:
        random.seed(3)
        return random.random(), random.Random("a").random(), random.Random(5.0).random()

    assert on_ranks(draws, draws) == [draws()] * 2


def test_threads_and_other_processes_draw_on_their_own() -> None:
    def draws() -> list[bytes]:
        read, write = os.pipe()
        if not (child := os.fork()):
            os.write(write, os.urandom(8))
            os._exit(0)
        os.waitpid(child, 0)
        with ThreadPoolExecutor(1) as pool:
            found = [os.read(read, 8), pool.submit(os.urandom, 8).result(), os.urandom(8)]
        os.close(read)
        os.close(write)
        return found

    (forked, threads, own), others = on_ranks(draws, draws)
    assert forked != others[0]
    assert threads != others[1]
    assert own == others[2]


def test_libraries_that_need_names_of_their_own_get_them() -> None:
    from multiprocessing import shared_memory

    def makes() -> str:
        memory = shared_memory.SharedMemory(create=True, size=8)
        memory.close()
        memory.unlink()
        return memory.name

    first, second = on_ranks(makes, makes)
    assert first != second


# ---- folders ----


@contextmanager
def order_of(names: list[str]) -> Iterator[None]:
    """Let the file system have a folder's names in an order."""
    scan = os.scandir

    def scandir(path: Any) -> Any:
        with scan(path) as entries:
            found = {each.name: each for each in entries}
        ordered = sorted(found, key=lambda each: names.index(os.fsdecode(each)))
        return entries_of(found[each] for each in ordered)

    def listdir(path: Any) -> Any:
        return [entry.name for entry in scandir(path)]

    with patch.object(os, "listdir", listdir), patch.object(os, "scandir", scandir):
        yield


LISTS: dict[str, Callable[[str], Any]] = {
    "listdir": lambda folder: os.listdir(folder),
    "listdir of bytes": lambda folder: os.listdir(os.fsencode(folder)),
    "scandir": lambda folder: [(each.name, each.is_dir(), each.path) for each in os.scandir(folder)],
    "scandir of bytes": lambda folder: [each.path for each in os.scandir(os.fsencode(folder))],
    "glob": lambda folder: glob.glob(f"{folder}/*"),
    "rglob": lambda folder: [each.name for each in Path(folder).rglob("*")],
    "iterdir": lambda folder: [each.name for each in Path(folder).iterdir()],
    "walk": lambda folder: list(os.walk(folder)),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_folder_is_listed_in_one_order_however_the_file_system_has_it(name: str, tmp_path: Path) -> None:
    for each in "abc":
        (tmp_path / each).touch()
    (tmp_path / "sub").mkdir()
    alone, found = [], []
    for order in (["b", "sub", "a", "c"], ["sub", "a", "b", "c"]):
        with order_of(order):
            alone.append(LISTS[name](str(tmp_path)))
            with folders_sorted():
                found.append(LISTS[name](str(tmp_path)))
    first, second = found
    assert first == second
    assert alone[0] != alone[1]  # else this shows nothing
    if name in {"listdir", "iterdir"}:
        assert first == ["a", "b", "c", "sub"]


def test_open_folders_are_listed_too(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with folders_sorted(), os.scandir(folder) as entries:
        assert (os.listdir(folder), [*entries]) == ([], [])
        with pytest.raises(FileNotFoundError):
            os.listdir(tmp_path / "none")
    os.close(folder)


# ---- ranks that draw otherwise ----


def test_a_rank_that_drew_once_more_is_found_by_what_ranks_compare() -> None:
    def draws(times: int) -> str:
        for _ in range(times):
            uuid.uuid4()
        return asked()

    same = on_ranks(lambda: draws(2), lambda: draws(2))
    assert same[0] == same[1]
    assert "the system's entropy at test_alike.py" in same[0]
    other = on_ranks(lambda: draws(2), lambda: draws(3))
    assert other[0] != other[1]
    assert asked() == ""


def test_a_copy_of_a_generator_is_drawn_where_the_script_makes_it() -> None:
    def copies() -> str:
        copy.deepcopy(np.random.RandomState(3))
        return asked()

    assert "at test_alike.py" in on_ranks(copies)[0]  # not in a module of numpy's
    with alike(lambda find: find()):
        before = asked()
        with asking_alone():
            uuid.uuid4()
        assert asked() == before == ""


# ---- input ----


# Prints what a script reads.
READS = """
import sys
from itertools import count
from torch.distributed import FileStore
from ddp_patch.running.alike import alike

store, numbers = FileStore(sys.argv[1], 2), count()

def of_rank_0(find):
    name = str(next(numbers))
    if sys.argv[2] == "0":
        store.set(name, find())
    return store.get(name).decode()

with alike(of_rank_0):
    print(sys.stdin.isatty(), input("name? "), repr(sys.stdin.readline()), len(sys.stdin.read().split()))
"""


def test_every_rank_reads_the_input_of_rank_0(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("Ann\nsecond\n" + "word " * 5000)
    ranks = []
    with (tmp_path / "input").open() as given:  # all ranks have the same file open
        for rank in range(2):
            command = [sys.executable, "-c", READS, str(tmp_path / "store"), str(rank)]
            ranks.append(subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, text=True))  # noqa: S603 - our own
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert outputs == ["name? False Ann 'second\\n' 5000\n"] * 2
