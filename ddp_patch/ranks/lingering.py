"""Groups that this rank has left while others may still need its data: they are dropped after that."""

import atexit
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch

__all__ = ["NO_TAG", "cut", "let_go", "linger"]

# A tag that nothing is sent with.
NO_TAG = 2**30


class _Lingering(NamedTuple):
    """What is left of a channel while others may still need what this rank has said."""

    group: Any
    work: Any
    members: int
    place: int


_lingering: list[_Lingering] = []


def linger(group: Any, work: Any, members: int, place: int) -> None:
    """Keep a group until its work is over. To drop it before would wait for the others."""
    _lingering.append(_Lingering(group, work, members, place))


def let_go() -> None:
    """Drop what lingers and is over."""
    _lingering[:] = [channel for channel in _lingering if not channel.work.is_completed()]


@atexit.register
def _cut_all() -> None:
    """Break what lingers, so that no process waits for others at its end."""
    for channel in _lingering:
        cut(channel.group, channel.members, channel.place)
    _lingering.clear()


def cut(group: Any, members: int, place: int) -> None:
    """Break all connections of a group."""
    for other in range(members):
        if other != place:
            # gloo breaks all connections when a time is over.
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], other, NO_TAG).wait(timedelta(milliseconds=1))
