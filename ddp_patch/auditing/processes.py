"""The same on real ranks: processes of a gloo group, which differ in all that processes differ in."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ddp_patch.auditing.coding import Coding
from ddp_patch.auditing.drawing import Drawn
from ddp_patch.auditing.simulate import Rank
from ddp_patch.auditing.subject import Subject
from ddp_patch.errors import InvalidOptionError
from ddp_patch.testing import run_ranks

__all__ = ["drawn_by_processes"]


def drawn_by_processes(
    subject: Subject, world_size: int, epochs: int, alike: bool, timeout: float, coding: Coding
) -> list[list[Drawn]]:
    """Return each real rank's epochs.

    Raises:
        InvalidOptionError: What is audited cannot be pickled.
    """
    try:
        pickled = pickle.dumps(subject)
    except Exception as error:
        raise InvalidOptionError(
            f"audit with processes=True sends what it audits to other processes, and pickling {subject.name} raised "
            f"{type(error).__name__}: {error}. Pass a factory that is a function of a module."
        ) from error
    results = run_ranks(_draw, world_size, pickled, epochs, alike, timeout=timeout)
    return [[_adopted(drawn, theirs, coding) for drawn in ranks_epochs] for ranks_epochs, theirs in results]


def _draw(rank: int, world_size: int, pickled: bytes, epochs: int, alike: bool) -> tuple[Sequence[Drawn], Coding]:
    subject: Subject = pickle.loads(pickled)  # noqa: S301 - the parent's own
    coding = Coding()

    def build() -> DataLoader[Any]:
        made = subject.make
        return subject.finish(made) if isinstance(made, DataLoader) else subject.loader(rank, world_size)

    one = Rank(build, subject, seeded_as=0 if alike else rank)
    return [one.epoch(number, coding) for number in range(epochs)], coding


def _adopted(drawn: Drawn, theirs: Coding, coding: Coding) -> Drawn:
    items = coding.adopt(theirs, drawn.items).astype(np.int64)
    return Drawn(items, drawn.sizes, drawn.ended, drawn.told, drawn.seconds, drawn.memory, drawn.error)
