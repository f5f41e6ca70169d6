"""One epoch of one rank's loader, drawn and written down: without a dataset's ``__getitem__``."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader

from ddp_patch.auditing.draw.coding import Coding, Numbers, narrow
from ddp_patch.auditing.draw.subject import Subject
from ddp_patch.auditing.draw.subsets import in_base
from ddp_patch.auditing.draw.traits import made_of_batches
from ddp_patch.auditing.draw.workers import base_seed, batches_read
from ddp_patch.loaders.copying import Level, level
from ddp_patch.streams.chunks import own

__all__ = ["Drawn", "draw"]

# So many batches are drawn before they are written down.
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one rank drew in one epoch.

    Attributes:
        items: Every item's number, in order.
        sizes: How many items each step's batch had.
        ended: Whether the epoch came to its end; otherwise these are its first items.
        told: What ``len(loader)`` said before and after; None where it said nothing.
        seconds: How long drawing took, writing down left out.
        memory: How many bytes the process grew by meanwhile, as far as is known.
        error: What was raised, if anything.
    """

    items: Numbers
    sizes: Numbers
    ended: bool
    told: tuple[int | None, int | None] = (None, None)
    seconds: float = 0.0
    memory: int | None = None
    error: str | None = None

    def first_steps(self, steps: int) -> "Drawn":
        """Return what the first so many steps drew."""
        sizes = self.sizes[:steps]
        return Drawn(self.items[: int(sizes.sum())], sizes, False, self.told, self.seconds, self.memory, self.error)


def draw(loader: DataLoader[Any], coding: Coding, subject: Subject) -> Drawn:
    """Draw an epoch, or as much of it as is wanted, and write it down.

    Args:
        loader: A rank's.
        coding: Gives every item its number.
        subject: Says how much is drawn, and which numbers indices have.
    """
    items: list[Numbers] = []
    sizes: list[Numbers] = []
    error: str | None = None
    before, ended, seconds, count, grown = _length(loader), False, 0.0, 0, 0
    resident = _resident_bytes()
    steps = _in_base(_steps(loader), loader) if subject.in_base else _steps(loader)
    while count < subject.max_items and not ended and error is None:
        begun = time.perf_counter()
        block: list[list[Any]] = []
        try:
            # The first batch by itself: what the sampler has made for all of them is there then.
            block.extend(islice(_until(steps, subject.max_items - count), _BLOCK if items else 1))
        except Exception as raised:  # noqa: BLE001 - the user's own: it is what this rank would see
            error = f"{type(raised).__name__}: {raised}"
        seconds += time.perf_counter() - begun
        grown = max(grown, _resident_bytes() - resident - sum(part.nbytes for part in (*items, *sizes)))
        ended = error is None and not block
        if block:
            sizes.append(narrow(np.fromiter(map(len, block), np.int64, len(block))))
            items.append(narrow(coding.codes(list(chain.from_iterable(block)))))
            count += len(items[-1])
    if error is None and not ended:
        with suppress(Exception):  # what is raised after the last item asked for is beyond this sample
            ended = next(steps, None) is None
    told = (before, _length(loader))
    return Drawn(_joined(items), _joined(sizes), ended, told, seconds, grown if resident else None, error)


def _in_base(steps: Iterator[list[Any]], loader: DataLoader[Any]) -> Iterator[list[Any]]:
    return (list(in_base(loader.dataset, step)) for step in steps)


def _until(steps: Iterator[list[Any]], most: int) -> Iterator[list[Any]]:
    """Yield steps until they have so many items."""
    while most > 0 and (step := next(steps, None)) is not None:
        most -= max(1, len(step))
        yield step


def _joined(parts: list[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _length(loader: DataLoader[Any]) -> int | None:
    with suppress(Exception):  # a length that cannot be told, for whatever reason, is none
        return len(loader)
    return None


def _resident_bytes() -> int:
    """How much memory this process holds; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def _steps(loader: DataLoader[Any]) -> Iterator[list[Any]]:
    """Yield every step's items as the loader would ask for them: without a dataset's ``__getitem__``."""
    if level(loader) is Level.ITERABLE:
        yield from batches_read(loader)
        return
    batches = loader.batch_sampler
    indices = iter(cast(Iterable[Any], loader.sampler if batches is None else batches))
    base_seed(loader)
    if level(loader) is Level.SAMPLE:
        yield from indices  # torch's own make a new list for each batch
    elif batches is not None or made_of_batches(loader):
        yield from (list(own(batch)) for batch in indices)
    else:
        yield from ([own(item)] for item in indices)
