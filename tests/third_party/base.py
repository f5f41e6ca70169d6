"""What a loader of another package has to say of itself, to be tried."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

__all__ = ["Batch", "Case", "Fate", "N", "Numbers", "World", "files", "items_in"]

N = 23  # a prime: no world size but 1 divides it

_FOLDER = "THIRD_PARTY_FILES"

Batch = tuple[Any, ...]  # the items of a batch


class Fate(Enum):
    """What ``patch_dataloader_to_ddp`` does with a loader."""

    SHARED = "sharded"
    AS_IT_IS = "returned as it is"
    REFUSED = "refused"


@dataclass(frozen=True)
class World:
    """Which rank of how many makes a loader."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Case:
    """One loader, and what is expected of it.

    Attributes:
        package: The distribution that it comes from, as pip names it.
        name: What the page calls it: its class, and how it is used.
        make: Makes the loader as its users do, on a rank of a world.
        fate: What patching it must do.
        items: The items in one of its batches, each of which can be compared and hashed.
        whole: Whether batches are shared as they are. Else their items are.
        steps: How many batches of an endless loader one process takes.
        on_ranks: Whether its package asks the process group for the world. Real ranks are started then; else the
            world is given by hand.
        remedy: What the refusal says to do, done. It gets the loader and the options of the call.
        told: What the refusal says to do, in its words.
        repeats: Whether its package's own sharding repeats or leaves out samples.
    """

    package: str
    name: str
    make: Callable[[World], Any]
    fate: Fate = Fate.SHARED
    items: Callable[[Any], Batch] = field(default=lambda batch: items_in(batch))
    whole: bool = False
    steps: int | None = None
    on_ranks: bool = False
    remedy: Callable[[Any, dict[str, Any]], Any] | None = None
    told: str = ""
    repeats: bool = False

    def __str__(self) -> str:
        return f"{self.package}: {self.name}"


class Numbers(Dataset[int]):
    """Item i is i."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def items_in(batch: Any) -> Batch:
    """Return the numbers and texts in a batch."""
    return tuple(_leaves(batch))


def _leaves(value: Any) -> Iterator[Any]:
    match value:
        case torch.Tensor():
            yield from value.flatten().tolist()
        case dict():
            for held in value.values():
                yield from _leaves(held)
        case list() | tuple():
            for held in value:
                yield from _leaves(held)
        case _:
            yield value


def files(name: str, write: Callable[[Path], object]) -> Path:
    """Return a folder of files that are written where they are missing, and removed when this run ends."""
    if _FOLDER not in os.environ:  # which processes that this one starts inherit
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="third-party-")
        atexit.register(shutil.rmtree, os.environ[_FOLDER], ignore_errors=True)
    folder = Path(os.environ[_FOLDER], name)
    if not folder.exists():
        write(folder)
    return folder
