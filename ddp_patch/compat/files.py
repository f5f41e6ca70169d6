"""The names by which Python's own modules and numpy open, find, save and remove files."""

import bz2
import glob
import importlib
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def files_opened_by(open_file: Callable[..., Any]) -> Iterator[None]:
    """While entered, let a function open files, and let the present functions of ``os`` find and remove files.

    Args:
        open_file: Replaces ``open``.
    """
    openers: Any = importlib.import_module("numpy.lib._datasource")._file_openers
    openers.keys()  # numpy fills in the openers at the first use
    with ExitStack() as stack:
        stack.enter_context(patch("builtins.open", open_file))
        stack.enter_context(patch.object(io, "open", open_file))
        stack.enter_context(patch.object(io, "open_code", lambda path: open_file(path, "rb")))
        stack.enter_context(patch.object(tarfile, "bltn_open", open_file))
        stack.enter_context(patch.object(bz2, "_builtin_open", open_file))
        stack.enter_context(patch.dict(openers._file_openers, {None: open_file}))
        # With open folders, rmtree would not call the present os.unlink.
        stack.enter_context(patch.object(shutil, "_use_fd_functions", False))
        stack.enter_context(globbed_by_os())
        yield


@contextmanager
def globbed_by_os() -> Iterator[None]:
    """Let ``pathlib`` find files by what ``os`` has now, while entered."""
    # Since Python 3.13, pathlib finds files by functions that glob took from os when glob was imported.
    globber = getattr(glob, "_StringGlobber", None)
    with ExitStack() as stack:
        for name in () if globber is None else ("lstat", "scandir"):
            stack.enter_context(patch.object(globber, name, staticmethod(getattr(os, name))))
        yield
