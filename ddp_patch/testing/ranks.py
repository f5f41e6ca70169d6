"""Run a function on real ranks, and guard tests against unpatched loaders."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar, TypeVarTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.compat.fork_servers import Forked
from ddp_patch.errors import DDPPatchError, InvalidOptionError, NotPatchedError, RanksFailedError
from ddp_patch.loaders.hooks import about_to_use, called_before, made, places_recorded
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.testing.twins import become_unlike, environment_of, server_of
from ddp_patch.validation import counted, is_seconds, whole_number

__all__ = ["guard_this_process", "guarded", "run_ranks"]

R = TypeVar("R")


# The guard's environment variable, so that ranks are guarded, too, however a guarded test starts them.
_VARIABLE = "DDP_PATCH_GUARD"
_for_good = ExitStack()  # the guard of this process, as long as this is open


@contextmanager
def guarded() -> Iterator[None]:
    """While entered, raise an error when an unpatched loader is iterated in a process group of several ranks.

    Ranks that are started meanwhile are guarded, too, once they import ``ddp_patch``.

    Raises:
        NotPatchedError: From ``iter(loader)``, with the file and line that constructed the loader.

    Examples:
        >>> with guarded():
        ...     len(list(DataLoader(range(4))))  # no process group is up
        4
    """
    with patch.dict(os.environ, {_VARIABLE: "1"}), _iteration_guarded():
        yield


def guard_this_process() -> None:
    """Guard this process from now on if its environment says so, and otherwise stop guarding it."""
    _for_good.close()
    if _VARIABLE in os.environ:
        _for_good.enter_context(_iteration_guarded())


@contextmanager
def _iteration_guarded() -> Iterator[None]:
    with places_recorded(), called_before("__iter__", _require_sharded):
        yield


def _require_sharded(loader: DataLoader[Any]) -> None:
    about_to_use(loader)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and sharded_by(loader) is None:
        where = made(loader)
        unknown = "an unknown line, before the guard was on"
        place = unknown if where is None else where.place
        raise NotPatchedError(
            f"Rank {dist.get_rank()} of {ranks} iterates a {type(loader).__name__} that is not sharded, so every rank "
            f"gets all of its data. It was made at {place}. Pass it through patch_dataloader_to_ddp() there. If its "
            "sampler or dataset shards by itself, set is_ddp_aware = True in that class."
        )


Arguments = TypeVarTuple("Arguments")


def run_ranks(
    fn: Callable[[int, int, *Arguments], R],
    world_size: int,
    *args: *Arguments,
    timeout: float = 120.0,
    grace: float = 5.0,
    alike: Collection[str] = (),
) -> list[R]:
    """Call ``fn(rank, world_size, *args)`` on every rank of a new gloo group, and return what each rank returned.

    Every rank is a process with one torch thread, an initialised default process group, and the environment variables
    ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``. The ranks connect through a temporary file, not a
    port, so any number of groups may run at the same time. When the function returns or raises, all processes of all
    ranks have ended, ``DataLoader`` workers included. The function works on Linux and macOS.

    Ranks differ as much as the ranks of several machines. Each rank is forked from a server process. There are up to
    four server processes, started once and kept until this process ends. Ranks differ in hash seed, addresses, threads,
    home, temporary and cache folders, host name, time zone, locale, the order in which ``os`` lists a folder, the
    number of cores that ``os`` returns, imported modules, and the states of random generators. The rest of the
    environment is the caller's.

    Args:
        fn: A function that other processes can import from its module.
        world_size: The number of ranks, at least 1.
        args: Further arguments, picklable.
        timeout: How many seconds every rank has to return, once all have started; also the time-out of collectives.
        grace: How many seconds the other ranks may still run after a rank has failed, because their errors help to find
            the cause.
        alike: Names of environment variables that ranks take from the caller, such as ``"HOME"`` and ``"HF_HOME"``, to
            find downloads in these folders.

    Returns:
        The ranks' return values, by rank; they must be picklable.

    Raises:
        InvalidOptionError: ``world_size`` or ``timeout`` is not positive, or ``fn`` or an argument cannot be sent to
            another process.
        RanksFailedError: A rank raised an error, died or did not return in time. The message shows the traceback, or
            where the rank hung, once for all ranks that failed alike.

    Examples:
        >>> import operator
        >>> run_ranks(operator.add, 2)  # rank + world_size
        [2, 3]
    """
    __tracebackhide__ = True  # pytest shows the caller's line, not this function's
    _check_how(fn, grace, alike)
    world_size = whole_number("world_size", world_size)
    if world_size < 1 or not (is_seconds(timeout) and timeout > 0):
        raise InvalidOptionError(
            f"run_ranks was called with world_size={world_size} and timeout={timeout}. Pass at least 1 rank and a "
            "positive number of seconds."
        )
    with tempfile.TemporaryDirectory(prefix="run_ranks-") as folder, contextlib.ExitStack() as processes:
        for rank in range(world_size):  # start all servers before waiting for the first
            server_of(rank).ensure_running()
        environments = [{**os.environ, **environment_of(rank, alike)} for rank in range(world_size)]
        tasks = [
            _Task(fn, args, rank, world_size, timeout, Path(folder), environment)
            for rank, environment in enumerate(environments)
        ]
        ranks = [processes.enter_context(_started(task)) for task in tasks]
        _collect(ranks, time.monotonic() + timeout, grace)
    if all(rank.fate == "returned" for rank in ranks):
        return [rank.result for rank in ranks]
    raise RanksFailedError(_describe(getattr(fn, "__qualname__", repr(fn)), ranks, timeout))


def _check_how(fn: Callable[..., Any], grace: float, alike: Collection[str]) -> None:
    """Raise InvalidOptionError if an argument cannot be used."""
    if not callable(cast(object, fn)):
        raise InvalidOptionError(f"run_ranks was given {fn!r} ({type(fn).__name__}). Pass a function of a module.")
    if not (is_seconds(grace) and grace >= 0):
        raise InvalidOptionError(f"grace={grace!r} is not a number of seconds. Pass one of at least 0.")
    if isinstance(alike, str) or not (isinstance(alike, Collection) and all(isinstance(name, str) for name in alike)):
        raise InvalidOptionError(f"alike={alike!r} is not a list of names. Pass one, such as ['HOME', 'HF_HOME'].")


@dataclass
class _Rank:
    """A rank, as its parent process sees it."""

    process: Forked
    connection: Connection
    stack: Path  # the file into which the rank writes its stack on request
    fate: Literal["did not end", "returned", "raised", "died"] = "did not end"
    result: Any = None
    report: str = ""

    def receive(self) -> None:
        """Receive the rank's result or traceback, or store that it ended without one."""
        try:
            self.fate, self.result, self.report = pickle.loads(self.connection.recv_bytes())  # noqa: S301 - our own child's
        except EOFError:
            self.process.join()
            self.fate, code = "died", self.process.exitcode or 0
            self.report = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def ask_where(self) -> None:
        """Make a rank that hangs write its stack."""
        if self.process.pid is not None and self.stack.exists():
            with contextlib.suppress(ProcessLookupError):  # the rank has just ended
                os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
            self.report = self.stack.read_text()


@contextlib.contextmanager
def _started(task: "_Task") -> Iterator[_Rank]:
    """Start a rank; when left, end the rank and all processes that it started."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = Forked(server_of(task.rank), _rank_main, (task, sender))
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # the error depends on the pickled object
        receiver.close()
        sender.close()
        raise InvalidOptionError(
            f"run_ranks sends {task.fn!r} and its arguments to other processes, and pickling them raised "
            f"{type(error).__name__}: {error}. Pass a function of a module, by its name, and arguments that can be "
            "pickled."
        ) from error
    sender.close()  # so that the pipe closes when the rank ends
    try:
        yield _Rank(process, receiver, task.stack)
    finally:
        _kill(process)
        receiver.close()


def _let_interrupts_through() -> None:
    """Ignore an interrupt that came while this rank started, because its parent ends it.

    This process now leads a process group of its own, which a terminal's Ctrl-C does not reach.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)


def _kill(process: Forked) -> None:
    """End a rank and all processes that it started, but never a later process with the same number."""
    if process.pid is not None and (process.is_alive() or not _exists(process.pid)):
        with contextlib.suppress(ProcessLookupError):  # the rank and all its processes have ended
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # a rank that has just started leads no process group yet
    process.join()
    process.close()


def _exists(pid: int) -> bool:
    try:
        os.getpgid(pid)
    except ProcessLookupError:
        return False
    return True


def _collect(ranks: Sequence[_Rank], deadline: float, grace: float) -> None:
    """Receive from the ranks until all have ended, the grace after a failure is over, or the deadline has passed."""
    while running := {rank.connection: rank for rank in ranks if rank.fate == "did not end"}:
        for connection in (ready := wait(list(running), max(0.0, deadline - time.monotonic()))):
            running[connection].receive()  # type: ignore[index] # wait() returns its arguments
        if not ready:
            break
        if any(running[connection].fate != "returned" for connection in ready):  # type: ignore[index]  # as above
            deadline = min(deadline, time.monotonic() + grace)
    for rank in ranks:
        if rank.fate == "did not end":
            rank.ask_where()


# How the paths of this package's files begin, and the file name of methods that dataclasses generate.
_OWN = (str(Path(__file__).parents[1]) + os.sep, "<string>")
# Numbers in reports are ignored, because ranks that fail alike may name their own rank, count or address.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def _describe(name: str, ranks: Sequence[_Rank], timeout: float) -> str:
    """Return the error message: how every rank ended, and the ranks' reports."""
    fates: dict[str, list[int]] = {}
    alike: dict[tuple[str, str], list[int]] = {}
    for number, rank in enumerate(ranks):
        fates.setdefault(rank.fate, []).append(number)
        if rank.report:
            alike.setdefault((rank.fate, _NUMBER.sub("0", rank.report)), []).append(number)
    # All fates come first, because peers of a dead rank report errors that are not the cause.
    ended = ", ".join(f"{ranks_text(members)} {fate}" for fate, members in fates.items())
    only_slow = f", or pass a longer timeout= than {timeout:g} s if they were only slow"
    remedy = f"Correct what the ranks report{only_slow * (not {'raised', 'died'} & fates.keys())}"
    reports = [f"{name} failed on {counted(len(ranks), 'rank')}: {ended}. {remedy}."]
    for (fate, _), members in alike.items():
        if len(alike) > 1:
            as_one = f", as rank {members[0]} reports it" * (len(members) > 1)
            reports.append(f"--- {ranks_text(members)} {fate}{as_one} ---")
        reports.append(ranks[members[0]].report.strip())
    return "\n".join(reports)


@dataclass(frozen=True)
class _Task:
    """The task of a rank's process."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    rank: int
    world_size: int
    timeout: float
    folder: Path
    environment: Mapping[str, str]
    # Processes that the rank starts, such as DataLoader workers, start as in the parent.
    start_method: str = field(default_factory=multiprocessing.get_start_method)

    @property
    def stack(self) -> Path:
        return self.folder / f"stack-{self.rank}"


def _rank_main(task: _Task, sender: Connection) -> None:
    """Run one rank in its process, and send its result or traceback to the parent."""
    os.setsid()  # lead a process group, so that workers end with this rank
    _let_interrupts_through()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    multiprocessing.set_start_method(task.start_method, force=True)
    _set_environment(task)
    become_unlike(task.rank)
    torch.set_num_threads(1)
    with task.stack.open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
        try:
            message = pickle.dumps(("returned", _result(task), ""))
        except BaseException as error:  # noqa: BLE001 - the parent raises any error
            message = pickle.dumps(("raised", None, _shown_from_users_code(error)))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have replaced the stream
                stream.flush()  # the parent ends this process when it has the message
        sender.send_bytes(message)
        faulthandler.unregister(signal.SIGUSR1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _shown_from_users_code(error: BaseException) -> str:
    """Return an error with its traceback, without this package's lines, unless one of them raised the error."""
    told = traceback.TracebackException.from_exception(error)
    told.__suppress_context__ |= isinstance(error, DDPPatchError)  # the context is of this package's own code
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [frame.f_code.co_filename.startswith(_OWN) for frame, _ in frames]
    if isinstance(error, DDPPatchError) or not own[-1]:
        users = [line for line, is_own in zip(frames, own, strict=True) if not is_own]
        told.stack = traceback.StackSummary.extract(users)  # a summary without the lines of ^
    return "".join(told.format())


def _set_environment(task: _Task) -> None:
    os.environ.clear()
    os.environ |= task.environment
    os.environ |= {"RANK": str(task.rank), "WORLD_SIZE": str(task.world_size)}
    os.environ |= {"LOCAL_RANK": str(task.rank), "LOCAL_WORLD_SIZE": str(task.world_size)}
    for interface in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _result(task: _Task) -> Any:
    """Join the process group and call the function."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.folder / 'store'}",
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.timeout),
    )
    dist.barrier()  # so that no rank ends while another still connects to it
    guard_this_process()
    return task.fn(task.rank, task.world_size, *task.args)


def _end_with_parent() -> None:
    """End this process and all processes that it started when the parent ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
