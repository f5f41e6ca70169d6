"""What a launcher has told this process: which rank it is, of how many, and where they meet.

A script that runs as one process is not to see that: many decide by ``RANK`` whether they are distributed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

__all__ = ["OF_RANK", "hidden", "is_hidden", "is_rank", "shown", "told"]


OF_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NAMES = (*OF_RANK, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_PREFIXES = ("ROLE_", "TORCHELASTIC_")
# The names under which a script may still read it.
_OWN = {"DDP_PATCH_RANK": "RANK", "DDP_PATCH_WORLD_SIZE": "WORLD_SIZE"}

_hidden: dict[str, str] = {}


def told(name: str, default: str = "") -> str:
    """Return what the launcher has put into the environment, hidden or not."""
    return os.environ.get(name, _hidden.get(name, default))


def is_rank() -> bool:
    """Return whether a launcher has started this process as one of several, or as the only one."""
    return all(told(name) for name in OF_RANK)


def is_hidden() -> bool:
    """Return whether the script does not see it."""
    return bool(_hidden)


@contextmanager
def hidden() -> Iterator[None]:
    """Hide it from the script, while entered; it may read ``DDP_PATCH_RANK`` and ``DDP_PATCH_WORLD_SIZE``."""
    _hidden.update({name: text for name, text in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)})
    with patch.dict(os.environ, {own: _hidden[name] for own, name in _OWN.items()}):
        for name in _hidden:
            del os.environ[name]
        try:
            yield
        finally:
            _hidden.clear()


@contextmanager
def shown() -> Iterator[None]:
    """Show it again, to torch."""
    with patch.dict(os.environ, _hidden):
        yield
