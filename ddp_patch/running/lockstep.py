"""Keep the ranks of a script in lockstep: what each does next is the same on all, or an error says who does what."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from itertools import count, groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import MissingRanksError, RankMismatchError
from ddp_patch.loaders.hooks import script_line
from ddp_patch.ranks.exchange import already_in, by_value, ranks_text

__all__ = ["Act", "Lockstep"]


class Act(Enum):
    """What a script does that all ranks do together."""

    OPTIMIZER = "makes an optimizer"
    LOADER = "begins to iterate a loader that is divided"
    BACKWARD = "calls backward()"
    EVALUATION = "begins to iterate a loader that is whole on every rank"
    END = "has come to its end"


# Each script that a process runs has keys of its own in the store.
_numbers = count()
# As many bytes are sent at once, as in DistributedDataParallel.
_BUCKET = 25 * 2**20


class Lockstep:
    """Compares what the ranks do next, each time before they communicate. A rank is alone until it joins others.

    Attributes:
        rank: This rank.
        ranks: How many there are.
        backwards: How often the script called ``backward()``.
        steps: How many steps its optimizers made.
    """

    def __init__(self) -> None:
        self.rank: int = 0
        self.ranks: int = 1
        self.backwards: int = 0
        self.steps: int = 0
        self._timeout = 0.0
        self._group: Any = None
        self._store: Any = None

    def join(self, timeout: float) -> None:
        """Join the ranks of the process group.

        Args:
            timeout: How many seconds a rank waits for the others.
        """
        self.rank, self.ranks, self._timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._store = dist.PrefixStore(f"ddp_patch/lockstep/{next(_numbers)}", default_store())  # type: ignore[attr-defined]  # in its __all__, not in its stubs

    @property
    def done(self) -> str:
        """What the script has done so far, in words."""
        return f"after {self.backwards} calls of backward() and {self.steps} optimizer steps"

    def meet(self, act: Act, *, usual: object = 0, **facts: int) -> bool:
        """Wait until every rank does the same, and compare it.

        Args:
            act: What this rank does.
            usual: What may differ: numbers.
            facts: At most two numbers that must be the same on every rank, by what they are.

        Returns:
            Whether ``usual`` is the same on every rank.

        Raises:
            RankMismatchError: Another rank does something else; every rank raises it.
            MissingRanksError: Another rank did not come within the timeout, or has ended.
        """
        if self.ranks == 1:
            return True
        done = [*Act].index(act), self.backwards, self.steps
        numbers = [*done, *(*facts.values(), 0, 0)[:2], hash(usual) >> 2]
        own = torch.tensor(numbers, device="cpu")  # whatever is the default
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
        if not self.meet(act, usual=tuple(facts().values())):
            gc.collect()
            self.meet(act, **facts())

    def gathered(self, value: Any) -> list[Any]:
        """Return each rank's value."""
        values = [value] * self.ranks
        if self.ranks > 1:
            self._together(lambda: dist.all_gather_object(values, value, self._group))
        return values

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the mean over all ranks into each of some dense tensors.

        The tensors have the same shapes, dtypes and order on every rank. What is equal on all ranks stays as it is, but
        for rounding.
        """
        for flat in _flattened(tensors):
            dist.all_reduce(flat.div_(self.ranks))

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make tensors of any dtypes those of rank 0. They have the same shapes, dtypes and order on every rank."""
        for flat in _flattened(tensors if self.ranks > 1 else []):
            dist.broadcast(flat.view(torch.uint8), 0)

    def leave(self, why: str) -> None:
        """Tell the others that this rank's script has ended on its own, and why."""
        if self.ranks > 1:
            with suppress(RuntimeError):  # the store may be gone
                self._store.set(f"ended/{self.rank}", why.encode())

    def _together(self, communicate: Callable[[], object]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            raise self._missing(str(error).splitlines()[0]) from None

    def _missing(self, why: str) -> MissingRanksError:
        """Return the error that says which ranks have ended, and why, as far as they told."""
        here = f"At {script_line(sys._getframe(1))}, {self.done}, rank {self.rank} waited for the others"
        try:
            ended = already_in(self._store, {rank: f"ended/{rank}" for rank in range(self.ranks)})
        except RuntimeError:
            return MissingRanksError(f"{here}, and the process group's store is gone: the rank that kept it has ended.")
        if ended:
            reasons = "; ".join(f"rank {rank} has ended: {reason.decode()}" for rank, reason in ended.items())
            return MissingRanksError(f"{here}: {reasons}.")
        return MissingRanksError(
            f"{here}, at most {self._timeout:g} s, and some did not come ({why}). Every rank runs the whole script, so "
            "each must make the same steps: let what it decides follow from whole evaluations, not from numbers of a "
            "part of a batch."
        )

    def _refuse(self, act: Act, facts: Mapping[str, int]) -> None:
        also = f" ({', '.join(f'{name}: {value}' for name, value in facts.items())})" if facts else ""
        doing = f"{act.value} at {script_line(sys._getframe(2))}, {self.done}{also}"
        rows = by_value(dict(enumerate(self.gathered(doing))))
        listed = "".join(f"\n  {ranks_text(ranks)} {row}" for row, ranks in rows.items())
        raise RankMismatchError(
            f"The ranks no longer do the same:{listed}\nEvery rank runs the whole script, so each must make the "
            "same steps: let what it decides follow from whole evaluations, not from the loss of a part of a batch, "
            "and from no random numbers that are drawn in a loop over a divided loader."
        )


@torch.no_grad()
def _flattened(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield flat copies of several tensors each, and put what becomes of each into these tensors."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for alike in kinds.values():
        ends = np.cumsum([tensor.nbytes for tensor in alike])
        for _, bucket in groupby(zip((ends - 1) // _BUCKET, alike, strict=True), key=itemgetter(0)):
            held = [tensor for _, tensor in bucket]
            flat = torch.cat([tensor.reshape(-1) for tensor in held])
            yield flat
            for tensor, part in zip(held, torch.split(flat, [tensor.numel() for tensor in held]), strict=True):
                tensor.copy_(part.view_as(tensor))
