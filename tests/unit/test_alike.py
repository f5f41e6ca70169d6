"""What the world gives a script is rank 0's: the same program, run as rank 0 and then as a later rank."""

import glob
import json
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
import torch.distributed as dist

from ddp_patch.errors import MissingRanksError, RankMismatchError
from ddp_patch.running.alike import alike, asked
from ddp_patch.running.overlay import entries_of, shadowed


def new_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]  # torch documents it


def on_ranks(*programs: Callable[[], Any]) -> list[Any]:
    """Return what programs return: that of rank 0, which is done before the others begin, and theirs."""
    store = new_store()
    found = []
    for rank, program in enumerate(programs):
        np.random.seed(0)  # numpy's seed() without a number leaves the place in the state
        with alike(store, rank, 1, 5):
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
        return entries_of(path, ordered, found)

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
def test_a_folder_is_listed_in_the_order_of_rank_0(name: str, tmp_path: Path) -> None:
    orders = [["b", "sub", "a", "c"], ["sub", "a", "b", "c"]]
    for each in "abc":
        (tmp_path / each).touch()
    (tmp_path / "sub").mkdir()

    found, store = [], new_store()
    for rank, order in enumerate(orders):
        with order_of(order):
            alone = LISTS[name](str(tmp_path))
            with alike(store, rank, 1, 5):
                found.append((alone, LISTS[name](str(tmp_path))))
    (alone, first), (other_alone, second) = found
    assert first == second == alone
    assert alone != other_alone  # else this shows nothing


def test_a_shadow_lists_its_own_files_where_those_of_rank_0_are(tmp_path: Path) -> None:
    world, store = tmp_path / "world", new_store()
    (world / "runs").mkdir(parents=True)
    (world / "runs" / "given").touch()
    (world / "later").mkdir()

    def program(rank: int) -> tuple[list[str], list[str]]:
        Path(world, "runs", f"log-{rank}").write_text("as one of a time or a process")
        names = os.listdir(world / "runs")
        return names, [Path(world, "runs", name).read_text() for name in names]

    found = []
    for rank in range(2):
        with shadowed(rank, str(tmp_path / "shadows"), keep=True), alike(store, rank, 1, 5):
            found.append(program(rank))
    (names, texts), (other_names, other_texts) = found
    assert [name.replace("log-0", "log-1") for name in names] == other_names
    assert texts == other_texts


def test_a_folder_that_rank_0_does_not_find_is_on_no_rank(tmp_path: Path) -> None:
    def lists() -> str:
        with pytest.raises(FileNotFoundError) as raised:
            os.listdir(tmp_path / "none")
        (tmp_path / "none").mkdir(exist_ok=True)  # too late for rank 0
        return str(raised.value)

    first, second = on_ranks(lists, lists)
    assert first == second
    assert str(tmp_path / "none") in first


def test_open_folders_and_devices_are_read_where_they_are(tmp_path: Path) -> None:
    def lists() -> tuple[list[str], bool]:
        folder = os.open(tmp_path, os.O_RDONLY)
        found = os.listdir(folder)
        os.close(folder)
        return found, "self" in os.listdir("/proc")

    assert on_ranks(lists, lists) == [([], True)] * 2


# ---- ranks that ask for something else ----


def test_a_rank_that_asks_for_something_else_is_named_with_both_lines(tmp_path: Path) -> None:
    def lists() -> object:
        return os.listdir(tmp_path)

    def lists_elsewhere() -> object:
        return os.listdir(tmp_path)

    with pytest.raises(RankMismatchError) as raised:
        on_ranks(lists, lists_elsewhere)
    first = lists.__code__.co_firstlineno + 1
    for rank, line in enumerate((first, first + 3)):
        assert f"rank {rank} asked question 1" in str(raised.value)
        assert f"test_alike.py:{line}" in str(raised.value)


def test_a_rank_that_drew_once_more_is_found_by_what_ranks_compare(tmp_path: Path) -> None:
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
    with pytest.raises(RankMismatchError, match="question 4 to the world"):
        on_ranks(lambda: (draws(2), os.listdir(tmp_path)), lambda: (draws(3), os.listdir(tmp_path)))


def test_a_rank_that_asks_where_rank_0_never_does_says_so(tmp_path: Path) -> None:
    store = new_store()
    with alike(store, 0, 1, 5):
        pass
    with (
        alike(store, 1, 1, 0.1),
        pytest.raises(MissingRanksError, match=r"Rank 1 asked question 1 .*names in a folder"),
    ):
        os.listdir(tmp_path)


# ---- environment and input ----


# Prints what a script sees of input and environment, and what of these the store has.
READS = """
import json, os, sys
from torch.distributed import FileStore
from ddp_patch.running.alike import alike
rank = int(sys.argv[2])
store = FileStore(sys.argv[1], 2)
with alike(store, rank, 2, 60):
    print(sys.stdin.isatty(), input("name? "), repr(sys.stdin.readline()), len(sys.stdin.read().split()))
    seen = {name: os.environ.get(name) for name in ("LR", "ONLY_0", "ONLY_1", "TMPDIR", "CUDA_VISIBLE_DEVICES", "SAME")}
    print(json.dumps([seen, sorted(json.loads(store.get("start"))[1])]))
"""


def test_every_rank_reads_the_input_and_environment_of_rank_0(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("Ann\nsecond\n" + "word " * 5000)
    ranks = []
    with (tmp_path / "input").open() as given:  # all ranks have the same file open
        for rank in range(2):
            own = {"LR": f"{rank}", f"ONLY_{rank}": "1", "TMPDIR": f"folder {rank}", "CUDA_VISIBLE_DEVICES": f"{rank}"}
            command = [sys.executable, "-c", READS, str(tmp_path / "store"), str(rank)]
            options: dict[str, Any] = {"stdin": given, "stdout": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(command, env={**os.environ, "SAME": "secret", **own}, **options))  # noqa: S603 - our own
        outputs = [rank.communicate(timeout=120)[0].split("\n", 1) for rank in ranks]
    assert {said for said, _ in outputs} == {"name? False Ann 'second\\n' 5000"}
    for rank, (_, seen) in enumerate(outputs):
        own = {"TMPDIR": f"folder {rank}", "CUDA_VISIBLE_DEVICES": f"{rank}"}  # of the rank's own machine
        wanted = {"LR": "0", "ONLY_0": "1", "ONLY_1": None, "SAME": "secret", **own}
        assert json.loads(seen) == [wanted, ["LR", "ONLY_0", "ONLY_1"]]  # what is the same did not travel


def test_a_package_that_fills_a_cache_asks_for_itself() -> None:
    def lists(package: str) -> list[str]:
        names: dict[str, Any] = {"__name__": f"{package}.fonts", "os": os}
        exec(compile("found = os.listdir('/')", f"/site-packages/{package}/fonts.py", "exec"), names)  # noqa: S102
        return sorted(names["found"])

    # The other rank finds the cache that the first one has filled, and asks nothing.
    first, other = on_ranks(lambda: (lists("matplotlib"), asked()), asked)
    assert first[0] == sorted(os.listdir("/"))
    assert first[1] == other
    assert "fonts.py" in on_ranks(lambda: (lists("torchvision"), asked()))[0][1]
