"""Make ranks on one machine as unlike each other as ranks on several machines.

Each rank number has a server, which is a process with a hash seed and an environment of its own. Ranks are forked from
their server, which is much faster than starting a process.
"""

import importlib
import os
import random
import site
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_patch.compat.fork_servers import Server, own_folder, preloaded

__all__ = ["become_unlike", "environment_of", "server_of"]

_SERVERS = 4  # the fifth rank is like the first, but unlike three others
# Variables that name folders: a home, temporary files, caches.
_FOLDERS = (
    *("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "MPLCONFIGDIR"),
    *("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_MODULES_CACHE"),
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)
_ZONES = ("UTC", "Asia/Tokyo", "America/St_Johns", "Pacific/Auckland", "Asia/Kathmandu")
_LOCALES = ("en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8", "C", "POSIX")  # locales that exist everywhere
_MODULES = ("tabnanny", "pyclbr", "poplib", "zipapp")  # modules of Python that little else imports

_AT_START = ("PYTHONHASHSEED", "PYTHONPATH")  # set for servers only: ranks have the caller's values

_kept: list[bytes] = []


def server_of(rank: int) -> Server:
    """Return the server for a rank's number, which is kept until this process ends."""
    return _server(rank % _SERVERS, os.getpid())


def environment_of(rank: int, alike: Collection[str]) -> dict[str, str]:
    """Return the variables of a rank's environment that differ from other ranks' variables.

    Args:
        rank: The rank's number.
        alike: Names of variables that are left out.
    """
    differing = server_of(rank).environment
    return {name: value for name, value in differing.items() if name not in {*_AT_START, *alike}}


@cache
def _server(number: int, _: int) -> Server:
    """Return a server of the process with the second number: a forked child cannot use its parent's servers."""
    environment = {name: str(Path(own_folder(), f"{number}", name.lower())) for name in _FOLDERS}
    for folder in environment.values():
        Path(folder).mkdir(parents=True, exist_ok=True)  # the folders exist if a rank starts ranks itself
    environment["TZ"] = _ZONES[number % len(_ZONES)]
    environment["LANG"] = environment["LC_ALL"] = _LOCALES[number % len(_LOCALES)]
    environment["PYTHONUSERBASE"] = site.getuserbase()  # packages that pip has installed for the user are still found
    environment |= dict(zip(_AT_START, (f"{number + 1}", os.pathsep.join(filter(None, sys.path))), strict=True))
    # On macOS, a forked process cannot use system libraries that the server has started.
    modules = [] if sys.platform == "darwin" else ["ddp_patch.testing", *preloaded()]
    return Server(environment, modules)


def become_unlike(rank: int) -> None:
    """Make this process, whose environment is set, as unlike other ranks as a process on another machine."""
    number = rank % _SERVERS
    time.tzset()
    tempfile.tempdir = None  # so that it is read anew from the environment
    _change_machine(number)
    _kept.extend(bytes(1000) for _ in range(1000 * number))  # later objects have other addresses
    for _ in range(number % 4):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    for name in _MODULES[: number % 5]:
        importlib.import_module(name)
    np.random.seed()  # a fork does not reseed numpy
    for _ in range(number):
        random.random()
        np.random.random()
        torch.rand(1)


def _change_machine(number: int) -> None:
    """Let Python's functions describe a different machine for each number."""
    listed, scanned, uname, cores = os.listdir, os.scandir, os.uname(), os.cpu_count() or 1
    system: Any = os  # type checkers allow no assignment to functions of os
    system.listdir = lambda path=".": _in_order(listed(path), number)
    system.scandir = lambda path=".": _Entries(scanned(path), number)
    os.supports_fd.update({system.listdir, system.scandir})
    system.cpu_count = lambda: cores + number  # more cores than there are: with fewer, torch warns when workers start
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity
        system.sched_getaffinity = lambda pid: usable(pid) | set(range(cores, cores + number))
    if number:
        name = f"{uname.nodename}-{number}"
        system.uname = lambda: os.uname_result((uname.sysname, name, *uname[2:]))
        socket.gethostname = lambda: name


def _in_order(found: Sequence[Any], number: int) -> list[Any]:
    """Return the entries of a folder, beginning with another entry for each number."""
    ordered = sorted(found, key=lambda entry: entry.name if isinstance(entry, os.DirEntry) else entry)
    start = number % max(1, len(ordered))
    return ordered[start:] + ordered[:start]


class _Entries:
    """The iterator of ``os.scandir``, in another order."""

    def __init__(self, entries: Any, number: int) -> None:
        with entries:
            self._entries = iter(_in_order([*entries], number))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Yield no further entries."""
        self._entries = iter(())
