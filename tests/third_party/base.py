"""What a loader of another package has to say of itself, to be tried."""

import atexit
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from zoo import Indices as Numbers
from zoo import N

from ddp_patch import patch_dataloader_to_ddp

__all__ = ["HELD", "Batch", "Case", "Fate", "N", "Numbers", "World", "drawn_by", "files", "held_patched", "tars"]

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
    items: Callable[[Any], Batch] = field(default=lambda batch: tuple(_leaves(batch)))
    whole: bool = False
    steps: int | None = None
    on_ranks: bool = False
    remedy: Callable[[Any, dict[str, Any]], Any] | None = None
    told: str = ""
    repeats: bool = False

    def __str__(self) -> str:
        return f"{self.package}: {self.name}"


def drawn_by(sampler: Any = None, n: int = N, batch_size: int = 4, **options: Any) -> DataLoader[int]:
    """Return a loader of n numbers whose sampler is another package's, or by ``batch_sampler=`` its batch sampler."""
    if "batch_sampler" not in options:
        options |= {"batch_size": batch_size, "sampler": sampler}
    return DataLoader(Numbers(n), **options)


# What is said of a loader that holds another one, and that.
HELD = "outer.loader = patch_dataloader_to_ddp(outer.loader)"


def held_patched(outer: Any, options: dict[str, Any]) -> Any:
    """Patch the loader that another one holds."""
    outer.loader = patch_dataloader_to_ddp(outer.loader, **options)
    return outer


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the numbers and texts in a batch."""
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


def tars(folder: Path, shards: Iterable[Iterable[int]]) -> list[str]:
    """Write webdataset's tar files of some numbers each, and return their paths."""
    folder.mkdir(exist_ok=True)
    for place, shard in enumerate(shards):
        with tarfile.open(folder / f"{place}.tar", mode="w") as tar:
            for number in shard:
                text = str(number).encode()
                member = tarfile.TarInfo(f"{number:04}.cls")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    return sorted(map(str, folder.iterdir()))
