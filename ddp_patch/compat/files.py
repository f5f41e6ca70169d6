"""Where Python's own modules and numpy open, find, save and remove files, each by a name of its own."""

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

__all__ = ["files_opened_by"]


@contextmanager
def files_opened_by(open_file: Callable[..., Any]) -> Iterator[None]:
    """Let files be opened by a function while entered; and found and removed by what ``os`` has now.

    Args:
        open_file: Stands in the place of ``open``.
    """
    openers: Any = importlib.import_module("numpy.lib._datasource")._file_openers
    openers.keys()  # which numpy fills in at the first use
    with ExitStack() as stack:
        stack.enter_context(patch("builtins.open", open_file))
        stack.enter_context(patch.object(io, "open", open_file))
        stack.enter_context(patch.object(io, "open_code", lambda path: open_file(path, "rb")))
        stack.enter_context(patch.object(tarfile, "bltn_open", open_file))
        stack.enter_context(patch.object(bz2, "_builtin_open", open_file))
        stack.enter_context(patch.dict(openers._file_openers, {None: open_file}))
        # rmtree by open folders would go past what is in the place of os.unlink.
        stack.enter_context(patch.object(shutil, "_use_fd_functions", False))
        # As of Python 3.13, pathlib looks by functions that glob took from os when it was imported.
        globber = getattr(glob, "_StringGlobber", None)
        for name in () if globber is None else ("lstat", "scandir"):
            stack.enter_context(patch.object(globber, name, staticmethod(getattr(os, name))))
        yield
