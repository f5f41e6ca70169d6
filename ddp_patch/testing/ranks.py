"""Real ranks for tests: ``run_ranks`` runs a function on every rank of a gloo group made for it."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from ddp_patch.errors import InvalidOptionError, RanksFailedError
from ddp_patch.testing.guard import guard_this_process

__all__ = ["run_ranks"]

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


def run_ranks(
    fn: Callable[[int, int, *Arguments], R],
    world_size: int,
    *args: *Arguments,
    timeout: float = 120.0,
    grace: float = 5.0,
    start_method: Literal["spawn", "forkserver"] = "spawn",
) -> list[R]:
    """Call ``fn(rank, world_size, *args)`` on every rank of a new gloo group and return what each rank returned.

    Every rank is a process of its own (with one torch thread) that has an initialised default process group and the
    environment variables ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``. They meet
    through a temporary file, so no port is chosen and any number of groups may run side by side. When this returns
    or raises, no process of any rank is left, ``DataLoader`` workers included. For Linux and macOS.

    Args:
        fn: A function of a module, so that another process can import it.
        world_size: The number of ranks, at least 1.
        args: Further arguments, picklable.
        timeout: Seconds until every rank must have returned; also the collectives' time-out.
        grace: Seconds that the others may go on after one has failed: their own errors help to find the cause.
        start_method: How processes are started. With ``"spawn"`` each imports everything anew, as ranks that a launcher
            starts do. With ``"forkserver"`` a launch takes a fraction of that time, if
            ``multiprocessing.set_forkserver_preload(["ddp_patch.testing"])`` was called before the first one; ranks
            then have one hash seed.

    Returns:
        The ranks' return values, by rank; they must be picklable.

    Raises:
        InvalidOptionError: ``world_size`` or ``timeout`` is not positive.
        RanksFailedError: A rank raised, died or did not return in time; with each rank's traceback (a rank that hung:
            where it was).

    Examples:
        >>> import operator
        >>> run_ranks(operator.add, 2)  # rank + world_size
        [2, 3]
    """
    if world_size < 1 or timeout <= 0:
        raise InvalidOptionError(
            f"run_ranks with world_size={world_size} and timeout={timeout} can start nothing: pass at least 1 rank and "
            "a positive number of seconds."
        )
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="run_ranks-") as folder, contextlib.ExitStack() as processes:
        tasks = [_Task(fn, args, rank, world_size, timeout, Path(folder)) for rank in range(world_size)]
        ranks = [processes.enter_context(_started(task, start_method)) for task in tasks]
        _collect(ranks, deadline, grace)
    if all(rank.fate == "returned" for rank in ranks):
        return [rank.result for rank in ranks]
    raise RanksFailedError(_describe(getattr(fn, "__qualname__", repr(fn)), ranks, timeout))


@dataclass
class _Rank:
    """What the parent knows of one rank."""

    process: BaseProcess
    connection: Connection
    stack: Path  # where the rank writes its stack when asked
    fate: Literal["running", "returned", "raised", "died"] = "running"
    result: Any = None
    report: str = ""

    def receive(self) -> None:
        """Take the rank's last word, or note that it ended without one."""
        try:
            self.fate, content = pickle.loads(self.connection.recv_bytes())  # noqa: S301 - our own child's
        except EOFError:
            self.process.join()
            self.fate, code = "died", self.process.exitcode or 0
            self.report = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return
        if self.fate == "returned":
            self.result = content
        else:
            self.report = content

    def ask_where(self) -> None:
        """Have a rank that hangs write down where."""
        if self.process.pid is not None and self.stack.exists():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
            self.report = self.stack.read_text()


@contextlib.contextmanager
def _started(task: "_Task", start_method: Literal["spawn", "forkserver"]) -> Iterator[_Rank]:
    """Start one rank and, on leaving, end it with all that it started."""
    context: Any = multiprocessing.get_context(start_method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(task, sender))
    process.start()
    sender.close()  # so that the rank's end is seen as the end of the pipe
    try:
        yield _Rank(process, receiver, task.stack)
    finally:
        _kill(process)
        receiver.close()


def _kill(process: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself, and so did what it started
        if process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # for a rank so young that it leads no group yet
    process.join()
    process.close()


def _collect(ranks: Sequence[_Rank], deadline: float, grace: float) -> None:
    """Wait until every rank has ended, a failed one's peers had their grace, or time is up."""
    while running := {rank.connection: rank for rank in ranks if rank.fate == "running"}:
        for connection in (ready := wait(list(running), max(0.0, deadline - time.monotonic()))):
            running[connection].receive()  # type: ignore[index]  # wait() returns what it was given
        if not ready:
            break
        if any(running[connection].fate != "returned" for connection in ready):  # type: ignore[index]  # as above
            deadline = min(deadline, time.monotonic() + grace)
    for rank in ranks:
        if rank.fate == "running":
            rank.ask_where()


def _describe(name: str, ranks: Sequence[_Rank], timeout: float) -> str:
    # The first cause before its consequences: peers of a dead rank end by errors of their own.
    fates = ", ".join(f"rank {number} {_FATES[rank.fate]}" for number, rank in enumerate(ranks))
    reports = [
        f"--- rank {number} {_FATES[rank.fate]} ---\n{rank.report.strip()}"
        for number, rank in enumerate(ranks)
        if rank.report
    ]
    return "\n".join(
        [
            f"{name} did not return on every one of {len(ranks)} ranks within {timeout:g} s: {fates}. All were ended. "
            "Mend what the ranks say below, or pass a longer timeout= if they were only slow.",
            *reports,
        ]
    )


_FATES = {"running": "did not end", "returned": "returned", "raised": "raised", "died": "died"}


@dataclass(frozen=True)
class _Task:
    """What one rank's process is told."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    rank: int
    world_size: int
    timeout: float
    folder: Path
    # Of processes that the rank starts, such as DataLoader workers: as in the parent.
    start_method: str = field(default_factory=multiprocessing.get_start_method)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))  # that of the call

    @property
    def stack(self) -> Path:
        return self.folder / f"stack-{self.rank}"


def _rank_main(task: _Task, sender: Connection) -> None:
    """What a rank's process does."""
    os.setsid()  # a process group of its own, so that its workers can be ended with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    multiprocessing.set_start_method(task.start_method, force=True)
    os.environ.clear()
    os.environ |= task.environment
    os.environ |= {"RANK": str(task.rank), "WORLD_SIZE": str(task.world_size)}
    os.environ |= {"LOCAL_RANK": str(task.rank), "LOCAL_WORLD_SIZE": str(task.world_size)}
    for interface in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    torch.set_num_threads(1)
    with task.stack.open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{task.folder / 'store'}",
                rank=task.rank,
                world_size=task.world_size,
                timeout=timedelta(seconds=task.timeout),
            )
            dist.barrier()  # a rank that has done all may not leave while another still connects to it
            guard_this_process()
            message = pickle.dumps(("returned", task.fn(task.rank, task.world_size, *task.args)))
        except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
            message = pickle.dumps(("raised", traceback.format_exc()))
        sender.send_bytes(message)
        faulthandler.unregister(signal.SIGUSR1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
