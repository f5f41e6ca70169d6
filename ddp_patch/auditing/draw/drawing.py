"""Draw one epoch of one rank's loader and record it, without calling a dataset's ``__getitem__``."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Subset

from ddp_patch.auditing.draw.coding import Coding, Content, Numbers, narrow
from ddp_patch.auditing.draw.drawn import Drawn
from ddp_patch.auditing.draw.samples import contents, in_base
from ddp_patch.auditing.draw.subject import Subject
from ddp_patch.auditing.draw.traits import divides_batches, length_of, made_of_batches
from ddp_patch.auditing.draw.workers import Workers, base_seed
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.streams.chunks import begun, own

__all__ = ["draw"]

# Draw this many batches before recording them.
_BLOCK = 1024


def draw(facts: LoaderFacts[Any], workers: Workers, coding: Coding, subject: Subject) -> Drawn:
    """Draw an epoch, or its first ``subject.max_items`` items, and record it.

    Args:
        facts: What a look at one rank's loader told.
        workers: Read an iterable dataset.
        coding: Gives every item its number.
        subject: Says how many items to draw, and whether to compare samples by their contents.
    """
    length_before = length_of(facts.loader)
    record = _Record(coding)
    steps = workers.batches() if facts.level is Level.ITERABLE else _steps(facts)
    if facts.level is not Level.ITERABLE:
        steps = _as_samples(facts.dataset, steps, subject.by_contents)
    ended = False
    while record.count < subject.max_items and record.error is None and not ended:
        has_drawn = record.draw_block(steps, subject.max_items - record.count)
        ended = not has_drawn and record.error is None
    if record.error is None and not ended:
        # Ask for one step more: the epoch may end right here. An error beyond the last item asked for is no finding.
        with suppress(Exception):
            ended = next(steps, None) is None
    drawn = record.drawn(ended, (length_before, length_of(facts.loader)))
    # Each batch that is divided is shared by itself.
    parts = tuple(drawn.sizes.tolist()) if divides_batches(facts) else workers.parts
    return replace(drawn, asked=workers.have_asked, idle=workers.idle, parts=parts)


class _Record:
    """Record blocks of batches as numbers, with the time and memory that drawing them took.

    Args:
        coding: Gives every item its number.

    Attributes:
        count: Items recorded so far.
        error: The exception that the sampler or dataset raised, as text.
    """

    def __init__(self, coding: Coding) -> None:
        self.count: int = 0
        self.error: str | None = None
        self._coding = coding
        self._items: list[Numbers] = []
        self._sizes: list[Numbers] = []
        self._seconds = 0.0
        self._resident_before, self._grown = _resident_bytes(), 0

    def draw_block(self, steps: Iterator[list[Any]], most: int) -> bool:
        """Draw the next block of batches, of at most about ``most`` items; tell whether there was a batch."""
        # Draw the first batch alone: a sampler that makes its whole order at once holds it now, and may drop it later.
        batches = _BLOCK if self._items else 1
        block: list[list[Any]] = []
        begun = time.perf_counter()
        try:
            block.extend(islice(_until(steps, most), batches))
        except Exception as raised:  # noqa: BLE001 - the user's own: this rank would see it, too
            self.error = f"{type(raised).__name__}: {raised}"
        self._seconds += time.perf_counter() - begun
        recorded = sum(part.nbytes for part in (*self._items, *self._sizes))
        self._grown = max(self._grown, _resident_bytes() - self._resident_before - recorded)
        if block:
            self._sizes.append(narrow(np.fromiter(map(len, block), np.int64, len(block))))
            self._items.append(narrow(self._coding.codes(list(chain.from_iterable(block)))))
            self.count += len(self._items[-1])
        return bool(block)

    def drawn(self, ended: bool, lengths: tuple[int | None, int | None]) -> Drawn:
        """Return all that was recorded."""
        memory = self._grown if self._resident_before else None
        return Drawn(_joined(self._items), _joined(self._sizes), ended, lengths, self._seconds, memory, self.error)


def _as_samples(dataset: Any, steps: Iterator[list[Any]], by_contents: bool) -> Iterator[list[Any]]:
    """Yield what the indices of each step stand for: samples' contents, or indices below ``Subset`` layers."""
    held = contents(dataset) if by_contents else None
    if held is not None:
        return ([Content(held[item]) for item in step] for step in steps)
    return (in_base(dataset, step) for step in steps) if isinstance(dataset, Subset) else steps


def _until(steps: Iterator[list[Any]], most: int) -> Iterator[list[Any]]:
    """Yield steps until they hold ``most`` items."""
    while most > 0 and (step := next(steps, None)) is not None:
        most -= max(1, len(step))
        yield step


def _joined(parts: list[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _resident_bytes() -> int:
    """Return how much memory this process holds, in bytes; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def _steps(facts: LoaderFacts[Any]) -> Iterator[list[Any]]:
    """Yield the items of every step, as the loader would ask its dataset for them."""
    indices = begun(facts.iterated)
    base_seed(facts.loader)
    if facts.level is Level.SAMPLE:
        yield from indices  # torch's batch sampler makes a new list for each batch, so nothing needs copying
    elif facts.level is Level.BATCH or made_of_batches(facts):
        yield from (list(own(batch)) for batch in indices)
    else:
        yield from ([own(item)] for item in indices)
