"""Runs the script of a rank that torchrun has started, in a process that is forked from the server of its number.

torchrun itself runs in one that is forked from the first rank's, but is as it would be.
"""

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from typing import Any


def hand_over(command: Sequence[str]) -> None:
    """Run a script, and end as it ends."""
    rank = int(os.environ.get("RANK", "-1"))
    address, differing = json.loads(os.environ["TWINS"])[max(rank, 0)]
    if rank >= 0:
        del os.environ["TWINS"]
    server: Any = vars(forkserver)["_forkserver"]
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_WRONLY)
    server.ensure_running = resource_tracker.ensure_running
    workers_start = multiprocessing.get_start_method()
    environment = {**os.environ, **(differing if rank >= 0 else {})}
    process = _Handed(target=_run, args=(command, os.getcwd(), environment, rank, workers_start))
    process.start()
    if rank < 0:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # torchrun then ends its ranks
    process.join()
    code = process.exitcode or 0
    if code < 0:
        with contextlib.suppress(OSError):  # as of SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class _Handed(multiprocessing.get_context("forkserver").Process):  # type: ignore[misc]
    """A process that writes where this one writes."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "files": [reduction.DupFd(file) for file in (1, 2)]}


_left: dict[str, Any] = {}


def _run(command: Sequence[str], folder: str, environment: Mapping[str, str], rank: int, workers_start: str) -> None:
    this: Any = multiprocessing.current_process()
    for file, given in enumerate(this.files, 1):
        os.dup2(given.detach(), file)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    multiprocessing.set_start_method(workers_start, force=True)
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    if rank >= 0:
        from ddp_patch.testing.twins import become_unlike

        become_unlike(rank)
    sys.argv[:] = command
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    sys.stdout, sys.stderr = (os.fdopen(file, "w", buffering=1, encoding="utf-8", closefd=False) for file in (1, 2))
    # What the script leaves is not taken apart: torch's groups may wait for each other's threads then.
    _left.update(runpy.run_path(command[0], run_name="__main__"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
