"""Several fork servers; Python's multiprocessing itself has one.

Python documents neither the class of a fork server nor the class of the processes that it forks. Seen in Python 3.11 to
3.14.
"""

import io
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from typing import Any
from unittest.mock import patch

_starting = threading.Lock()  # so that no two threads change the environment at once


def own_folder() -> str:
    """Return a folder that is removed when this process ends."""
    return util.get_temp_dir()


def preloaded() -> list[str]:
    """Return the modules of ``multiprocessing.set_forkserver_preload``, without the main module."""
    server: Any = vars(forkserver)["_forkserver"]
    return [name for name in server._preload_modules if name != "__main__"]


class Server(forkserver.ForkServer):
    """A process from which other processes are forked; starts at its first use, and ends with this process.

    Args:
        environment: Variables of its environment, in addition to this process's variables.
        modules: The modules that it imports when it starts; missing modules are left out.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        super().__init__()
        self.environment = environment
        self.set_forkserver_preload([*modules])

    def ensure_running(self) -> None:
        """Start the server unless it runs."""
        resource_tracker.ensure_running()  # the tracker keeps this process's environment
        with (
            _starting,
            patch.dict(os.environ, self.environment),
            patch.object(connection, "arbitrary_address", _address),
            _interrupts_held_back(),
        ):
            super().ensure_running()


_LONGEST = 80  # a socket's path has at most about 100 characters; the folder for temporary files may have a longer one


def _address(family: str) -> str:
    """Return the address of a server."""
    folder = own_folder()
    if len(folder) > _LONGEST and os.path.isdir("/tmp"):  # noqa: S108 - mkdtemp makes a folder of this user's alone
        folder = tempfile.mkdtemp(prefix="ddp_patch-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)
    return tempfile.mktemp(prefix="listener-", dir=folder)  # noqa: S306 - no other user may write there


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Keep Ctrl-C from processes that are started meanwhile, and from their children, which would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Forked(ForkServerProcess):
    """A process that is forked from a given server."""

    def __init__(self, server: Server, target: Callable[..., object], args: Sequence[Any]) -> None:
        super().__init__(target=target, args=args)
        self._server = server

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_server"}

    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        if parent_sentinel is not None and connection.wait([parent_sentinel], 0):
            return 1  # the process that started this one has ended meanwhile
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc,no-any-return]  # no stub has it

    def _Popen(self, process_obj: "Forked") -> Any:  # type: ignore[override]  # noqa: N802 - the method that start() calls
        return _Popen(process_obj, self._server)


class _Popen(popen_forkserver.Popen):
    """``popen_forkserver.Popen``, but with a given server."""

    def __init__(self, process_obj: Forked, server: Server) -> None:
        self._server = server
        self._fds: list[int] = []
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, pipe = self._server.connect_to_new_process(self._fds)
        kept = os.dup(pipe)  # closes when this process ends, which the other process notices
        self.finalizer = util.Finalize(self, _close, (kept, self.sentinel))
        with open(pipe, "wb") as file:
            file.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _close(*files: int) -> None:
    for file in files:
        os.close(file)
