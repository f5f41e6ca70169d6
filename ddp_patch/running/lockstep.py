"""Keep the ranks of a script in lockstep: what each does next is the same on all, or an error says who does what."""

import gc
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import MissingRanksError, RankMismatchError
from ddp_patch.loaders.hooks import script_line
from ddp_patch.ranks.exchange import already_in, by_value, ranks_text

__all__ = ["Act", "Counts", "Lockstep"]


class Act(Enum):
    """What a script does that all ranks do together."""

    OPTIMIZER = "makes an optimizer"
    LOADER = "begins to iterate a loader that is divided"
    BACKWARD = "calls backward()"
    EVALUATION = "begins to iterate a loader that is whole on every rank"
    END = "has come to its end"


# Each script that a process runs has keys of its own in the store.
_numbers = count()
# How often a rank writes down where its script is, for the others to read if they miss it.
_PERIOD_S = 2.0
_ENDED = "has ended"


@dataclass
class Counts:
    """What a script has done on this rank.

    Attributes:
        backwards: How often it called ``backward()``.
        steps: How many steps its optimizers made.
    """

    backwards: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"after {self.backwards} calls of backward() and {self.steps} optimizer steps"


class Lockstep:
    """Compares what the ranks do next, each time before they communicate.

    Args:
        timeout: How many seconds a rank waits for the others.
        counts: What the script has done so far.

    Attributes:
        rank: This rank.
        ranks: How many there are.
    """

    def __init__(self, timeout: float, counts: Counts) -> None:
        self.rank: int = dist.get_rank()
        self.ranks: int = dist.get_world_size()
        self._timeout, self._counts = timeout, counts
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._store: Any = dist.PrefixStore(f"ddp_patch/lockstep/{next(_numbers)}", default_store())  # type: ignore[attr-defined]  # in its __all__, not in its stubs
        self._script = threading.get_ident()
        self._is_over = threading.Event()
        self._writer = threading.Thread(target=self._write_places, daemon=True, name="ddp_patch.lockstep")
        self._writer.start()

    def meet(self, act: Act, *, usual: int = 0, **facts: int) -> bool:
        """Wait until every rank does the same, and compare it.

        Args:
            act: What this rank does.
            usual: A number that may differ.
            facts: At most two numbers that must be the same on every rank, by what they are.

        Returns:
            Whether ``usual`` is the same on every rank.

        Raises:
            RankMismatchError: Another rank does something else; every rank raises it.
            MissingRanksError: Another rank did not come within the timeout, or has ended.
        """
        done = [*Act].index(act), self._counts.backwards, self._counts.steps
        own = torch.tensor([*done, *(*facts.values(), 0, 0)[:2], usual], device="cpu")  # whatever is the default
        largest = torch.cat([own, -own])
        self._together(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, self._group))
        differs = largest[: len(own)] != -largest[len(own) :]
        if bool(differs[:-1].any()):
            self._refuse(act, facts)
        return not bool(differs[-1])

    def meet_alike(self, act: Act, facts: Callable[[], Mapping[str, int]]) -> None:
        """Meet, and compare facts that follow from what is alive.

        What a script has dropped in a cycle of references lives on until garbage is collected, which each rank does at
        its own time. So before ranks are said to differ, all collect it.

        Raises:
            RankMismatchError: As ``meet``.
            MissingRanksError: As ``meet``.
        """
        if not self.meet(act, usual=hash(tuple(facts().values())) >> 2):
            gc.collect()
            self.meet(act, **facts())

    def gathered(self, value: Any) -> list[Any]:
        """Return each rank's value."""
        values: list[Any] = [None] * self.ranks
        self._together(lambda: dist.all_gather_object(values, value, self._group))
        return values

    def put(self, name: str, value: bytes) -> None:
        """Leave a value of this rank for the others, in place of an earlier one of that name."""
        self._store.set(f"{name}/{self.rank}", value)

    def left(self, name: str) -> dict[int, bytes]:
        """Return what the ranks have left under a name so far, by rank; it does not wait."""
        return already_in(self._store, {rank: f"{name}/{rank}" for rank in range(self.ranks)})

    def leave(self, why: str) -> None:
        """Tell the others that this rank's script has ended on its own, and why."""
        self.stop()
        with suppress(RuntimeError):  # the store may be gone
            self.put("place", f"{_ENDED}: {why}".encode())

    def stop(self) -> None:
        """Write down no more where the script is."""
        self._is_over.set()
        self._writer.join()

    def _together(self, communicate: Callable[[], object]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            raise self._missing(str(error).splitlines()[0]) from None

    def _missing(self, why: str) -> MissingRanksError:
        """Return the error that says where the script is on each rank, as far as it was written down."""
        here = f"At {script_line(sys._getframe(1))}, rank {self.rank} waited for the others"
        try:
            places = {rank: place.decode() for rank, place in self.left("place").items() if rank != self.rank}
        except RuntimeError:
            return MissingRanksError(f"{here}, and the process group's store is gone: the rank that kept it has ended.")
        where = "".join(f"\n  rank {rank} {place}" for rank, place in sorted(places.items()))
        if any(place.startswith(_ENDED) for place in places.values()):
            ended = "; ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()) if _ENDED in place)
            return MissingRanksError(f"{here}: {ended}.")
        return MissingRanksError(
            f"{here}, at most {self._timeout:g} s, and they did not come ({why}). Last seen:{where}\nEvery rank runs "
            "the whole script, so each must make the same steps: let what it decides follow from whole evaluations, "
            "not from numbers of a part of a batch."
        )

    def _refuse(self, act: Act, facts: Mapping[str, int]) -> None:
        doing = f"{act.value} at {script_line(sys._getframe(2))}"
        also = f" ({', '.join(f'{name}: {value}' for name, value in facts.items())})" if facts else ""
        rows = by_value(dict(enumerate(self.gathered(f"{doing}, {self._counts}{also}"))))
        listed = "".join(f"\n  {ranks_text(ranks)} {row}" for row, ranks in rows.items())
        raise RankMismatchError(
            f"The ranks no longer do the same:{listed}\nEvery rank runs the whole script, so each must make the "
            "same steps: let what it decides follow from whole evaluations, not from the loss of a part of a batch, "
            "and from no random numbers that are drawn in a loop over a divided loader."
        )

    def _write_places(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            where = f"is at {script_line(sys._current_frames().get(self._script))}, {self._counts}"
            with suppress(RuntimeError):  # the store may be gone
                self.put("place", where.encode())
