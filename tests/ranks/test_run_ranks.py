"""``run_ranks`` itself: results, each rank's traceback, and nothing left behind whatever the ranks do."""

import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import assert_tells
from torch.utils.data import DataLoader
from zoo import Indices

from ddp_patch.compat.fork_servers import Forked
from ddp_patch.errors import RanksFailedError
from ddp_patch.testing import run_ranks
from ddp_patch.testing.ranks import _kill
from ddp_patch.testing.twins import server_of


def note_pid(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()


def alive(folder: Path) -> list[str]:
    """The processes that noted themselves and still run."""
    pids = [path.name for path in folder.iterdir()]
    return [pid for pid in pids if Path("/proc", pid).exists() and "\nState:\tZ" not in status(pid)]


def status(pid: str) -> str:
    try:
        return Path("/proc", pid, "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ"


def until_none_is_alive(folder: Path) -> bool:
    deadline = time.monotonic() + 60
    while alive(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(folder)


def add_up(rank: int, world_size: int, offset: int) -> tuple[torch.Tensor, str, str]:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return total, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]


def start_workers(folder: str) -> Any:
    note_pid(folder)
    loader: DataLoader[Any] = DataLoader(Indices(), num_workers=1, worker_init_fn=lambda _: note_pid(folder))
    iterator = iter(loader)
    next(iterator)
    return iterator


def one_raises(rank: int, world_size: int, folder: str) -> None:
    workers = start_workers(folder)
    if rank == 1:
        raise LookupError("rank 1 found nothing")
    dist.barrier()
    del workers


def one_dies(rank: int, world_size: int, folder: str) -> None:
    workers = start_workers(folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    del workers


def one_hangs(rank: int, world_size: int, folder: str) -> None:
    workers = start_workers(folder)
    if rank == 1:
        time.sleep(1000)
    del workers


def one_exits(rank: int, world_size: int, folder: str) -> None:
    start_workers(folder)
    if rank == 1:
        os._exit(3)


def in_an_environment(rank: int, world_size: int) -> str | None:
    return os.environ.get("SET_BEFORE_THE_CALL")


def test_every_ranks_return_value_comes_back_and_it_has_the_environment_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = run_ranks(add_up, 3, 10)
    assert results == [(torch.tensor(33), str(rank), "3") for rank in range(3)]
    assert run_ranks(in_an_environment, 1) == [None]
    monkeypatch.setenv("SET_BEFORE_THE_CALL", "yes")
    assert run_ranks(in_an_environment, 1) == ["yes"]


class SlowToConnect:
    """An argument with which rank 0 takes a second longer than the others to connect, and then notes itself."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, str]) -> None:
        connect = dist.init_process_group

        def slowly(*args: Any, **options: Any) -> None:
            connect(*args, **options)
            if options["rank"] == 0:
                time.sleep(1)
                note_pid(state["folder"])

        pytest.MonkeyPatch().setattr(dist, "init_process_group", slowly)


def how_many_are_there(rank: int, world_size: int, slow: SlowToConnect, folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def test_no_rank_begins_before_all_are_connected(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert run_ranks(how_many_are_there, 2, SlowToConnect(folder), folder) == [1, 1]


@pytest.mark.parametrize(
    ("fn", "timeout", "said"),
    [
        (one_raises, 60, ["rank 1 raised", "LookupError: rank 1 found nothing", "Connection"]),
        (one_dies, 60, ["rank 1 died ---\nkilled by SIGKILL"]),
        (one_exits, 60, ["rank 0 returned, rank 1 died. Correct what the ranks report.\nexit code 3"]),
        (one_hangs, 20, ["rank 1 did not end", "in one_hangs", "a longer timeout= than 20 s"]),
    ],
)
def test_a_rank_that_fails(fn: Any, timeout: float, said: list[str], tmp_path: Path) -> None:
    run_ranks(in_an_environment, 2)  # the server, too, takes its time to start
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(fn, 2, str(tmp_path), timeout=timeout)
    message = str(caught.value)
    assert_tells(message.split("\n")[0], (fn.__name__, "2 ranks"), "the ranks report")
    assert [part for part in said if part not in message] == []
    assert len(list(tmp_path.iterdir())) == 4  # both ranks and their workers noted themselves
    assert until_none_is_alive(tmp_path)


def hang(rank: int, world_size: int) -> None:
    time.sleep(60)


def test_a_rank_that_ends_just_when_it_is_asked_where_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)  # ranks are ended by killpg
    with pytest.raises(RanksFailedError, match="rank 0 did not end"):
        run_ranks(hang, 1, timeout=3)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = f"import test_run_ranks as t; t.run_ranks(t.one_hangs, 2, {str(tmp_path)!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment)  # noqa: S603 - our own script
    deadline = time.monotonic() + 120
    while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert len(list(tmp_path.iterdir())) == 4
    assert until_none_is_alive(tmp_path)


def test_who_has_the_number_of_a_rank_that_has_ended_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes note of an end at once, and from then on the number is anybody's."""
    rank: Any = Forked(server_of(0), int, ())
    rank.start()
    multiprocessing.connection.wait([rank.sentinel])
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    monkeypatch.setattr(rank._popen, "pid", stranger.pid)
    _kill(rank)
    stranger.communicate(b"\n")
    assert stranger.returncode == 0


def not_picklable(rank: int, world_size: int) -> Any:
    return lambda: rank


def test_a_result_that_cannot_be_sent_is_the_ranks_error() -> None:
    with pytest.raises(RanksFailedError, match=r"rank 0 raised(.|\n)*pickle"):
        run_ranks(not_picklable, 1)


def test_a_function_that_cannot_be_sent_starts_nothing() -> None:
    with pytest.raises(Exception, match="pickle"):
        run_ranks(lambda rank, world_size: rank, 2)
