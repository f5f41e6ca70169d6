"""Ranks of tests differ in all that ranks of several machines may differ in, and in nothing else."""

import locale
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick import run_ranks, soaked

from ddp_patch.testing.twins import environment_of

RANKS = 3
CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR")


def world_of(rank: int, world_size: int, listed: Path) -> dict[str, Any]:
    """What a rank sees of the machine that it believes itself on, and of what happened in its process before."""
    with os.scandir(listed) as entries:
        scanned = [entry.name for entry in entries]
    imported_anew = threading.Thread()
    return {
        "process tree": os.getppid(),
        "process group": os.getpgid(0),
        "hash seed": hash("a word"),
        "order of a set": "".join({f"{number}" for number in range(20)}),
        "addresses of what is older": id(object),
        "addresses of what is new": id(imported_anew),
        "thread": threading.get_ident(),
        "name of the next thread": imported_anew.name,
        "TMPDIR": os.environ["TMPDIR"],
        "folder for temporary files": tempfile.gettempdir(),
        "HOME": Path.home(),
        **{name: os.environ[name] for name in CACHES},
        "host name": socket.gethostname(),
        "host name of the system": os.uname().nodename,
        "time zone": time.strftime("%H:%M %Z", time.localtime(0)),
        "locale": os.environ["LC_ALL"],
        "order of os.listdir": os.listdir(listed),
        "order of os.scandir": scanned,
        "order of os.walk": next(os.walk(listed))[2],
        "order of a path's": [path.name for path in listed.iterdir()],
        "imported": sorted({"tabnanny", "pyclbr", "poplib", "zipapp"} & {*sys.modules}),
        "drawn by random": random.random(),
        "drawn by numpy": np.random.random(),
        "drawn by torch": torch.rand(1).item(),
        "cores": os.cpu_count(),
        "cores of the process": len(os.sched_getaffinity(0)),
    }


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    for name in "dabc":
        (tmp_path / name).touch()
    return tmp_path


def test_ranks_differ_in_all_in_which_machines_do(listed: Path) -> None:
    ranks = run_ranks(world_of, RANKS, listed)
    alike = [name for name in ranks[0] if len({str(rank[name]) for rank in ranks}) < RANKS]
    assert alike == []
    for rank in ranks:
        assert sorted(rank["order of os.listdir"]) == sorted(rank["order of os.scandir"]) == [*"abcd"]
        assert all(Path(rank[name]).is_dir() for name in ("TMPDIR", "HOME", *CACHES))


def test_a_rank_is_like_itself_in_the_next_call(listed: Path) -> None:
    again = {"process group", "addresses of what is new", "drawn by random", "drawn by numpy"}
    first, then = (run_ranks(world_of, 1, listed)[0] for _ in range(2))
    assert {name for name in first if first[name] != then[name]} <= again


def rest_of_the_world(rank: int, world_size: int, folder: Path, differing: Sequence[str]) -> dict[str, Any]:
    (folder / f"{rank}").touch()
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "LOCAL_RANK", *differing}}
    from_home = subprocess.run([sys.executable, "-c", "import sys; print(sys.path)"], capture_output=True, check=True)
    return {
        "environment": environment,
        "hash seed": os.environ.get("PYTHONHASHSEED"),
        "imports from": (sys.path, os.environ.get("PYTHONPATH")),
        "folder": os.getcwd(),
        "threads of torch": torch.get_num_threads(),
        "of processes that it starts": from_home.stdout,
        "locale is there": bool(locale.setlocale(locale.LC_ALL, "")),
    }


def test_ranks_have_the_callers_environment_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_THE_TEST", "yes")
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # of processes that ranks start
    first, *others = run_ranks(rest_of_the_world, RANKS, tmp_path, [*environment_of(0, alike=())])
    assert [name for name in first if [rank[name] for rank in others] != [first[name]] * (RANKS - 1)] == []
    assert (first["environment"]["SET_BY_THE_TEST"], first["hash seed"]) == ("yes", "7")
    assert first["imports from"][1] == os.environ.get("PYTHONPATH")
    assert first["threads of torch"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def started_by_a_rank(rank: int, world_size: int) -> list[tuple[int, str]]:
    return run_ranks(server_folder, 2)


def test_a_rank_starts_ranks_itself() -> None:
    ((first, _), (second, _)), ((third, _), (fourth, _)) = run_ranks(started_by_a_rank, 2)
    assert len({first, second, third, fourth}) == 4


def homes(rank: int, world_size: int) -> tuple[str | None, str | None, str | None]:
    return os.environ.get("HOME"), os.environ.get("HF_HOME"), os.environ["TZ"]


def test_what_is_to_be_alike_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/the/caller")
    monkeypatch.delenv("HF_HOME", raising=False)
    found = run_ranks(homes, 2, alike=["HOME", "HF_HOME"])
    assert [rank[:2] for rank in found] == [("/home/of/the/caller", None)] * 2
    assert found[0][2] != found[1][2]


# A suite of a user's: the process starts two servers, tells who they are, and waits.
SUITE = """
import os, signal, time
from test_twins_ranks import server_folder
from ddp_patch.testing import run_ranks
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
    print(*[part for rank in run_ranks(server_folder, 2) for part in rank], flush=True)
    time.sleep({waits})
"""


def server_folder(rank: int, world_size: int) -> tuple[int, str]:
    return os.getppid(), os.environ["HOME"]


@pytest.mark.parametrize(("waits", "by"), [soaked(0, None), soaked(60, signal.SIGINT), (60, signal.SIGKILL)])
def test_servers_end_with_the_process_that_they_serve(waits: int, by: signal.Signals | None, tmp_path: Path) -> None:
    script = tmp_path / "suite.py"
    script.write_text(SUITE.format(waits=waits))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # A process group of its own, to which a terminal sends Ctrl-C: servers and all.
    process = subprocess.Popen(  # noqa: S603 - our own script
        [sys.executable, script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    first, its_home, second, other_home = process.stdout.readline().decode().split()
    if by is signal.SIGINT:
        os.killpg(process.pid, by)
    elif by is not None:
        process.kill()
    _, said = process.communicate(timeout=60)
    assert said.count(b"Traceback") == (by is signal.SIGINT)  # the suite's own KeyboardInterrupt
    deadline = time.monotonic() + 60
    while (there := [pid for pid in (first, second) if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert there == []
    if by is not signal.SIGKILL:
        assert not Path(its_home).exists()
        assert not Path(other_home).exists()


def runs(pid: str) -> bool:
    try:
        return "\nState:\tZ" not in Path("/proc", pid, "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# Two pytest processes of a user's suite, each with servers of its own.
TESTS = """
import os, pytest
from ddp_patch.testing import run_ranks
def ends(rank, world_size):
    return os.getppid()
@pytest.mark.parametrize("number", range(4))
def test_it(number):
    first, second = run_ranks(ends, 2)
    assert first != second
"""


@pytest.mark.soak  # as these tests themselves are run
def test_a_users_suite_under_xdist(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "test_it.py"]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = mine | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    assert "4 passed" in done.stdout, done.stdout
    assert [path.name for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("pytest-of-")] == []
