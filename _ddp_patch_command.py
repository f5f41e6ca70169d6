"""Start ``ddp-patch``, so that Ctrl-C ends it in one word from the beginning.

It stands beside the package, because importing a module of a package imports the package: this one takes seconds to
import, torch with it, and an interrupt would print a traceback of them.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["INTERRUPTED", "main"]

INTERRUPTED = 130  # as shells say of a program that Ctrl-C ended: 128 and the signal's number
_STDERR = 2


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:
        _hash_alike()
    with _ended_by_interrupts():
        from ddp_patch.__main__ import loaded

        run = loaded(sys.argv[1:])
    run()


def _hash_alike() -> None:
    """Start this process anew where Python would hash strings otherwise in each: a single rank then runs in this one.

    It takes no time before torch is imported. Ranks of a launcher, and ``python -m ddp_patch``, which has imported it,
    go on as they are.
    """
    is_random = os.environ.get("PYTHONHASHSEED", "random") == "random"
    if is_random and os.name == "posix" and "RANK" not in os.environ and "torch" not in sys.modules:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this very command


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """End the process at once on Ctrl-C: imports catch errors, or are left half done if one is raised."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # such as a background job's, which ignores it
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: Any) -> None:
    os.write(_STDERR, b"\nInterrupted\n")
    os._exit(INTERRUPTED)
