"""Exchange tensors between the ranks of a script, and notice at each exchange whether the ranks still do the same.

Every exchange begins with a block of fixed length. The block holds what this rank does (as a checksum), how many
exchanges, calls and steps there were, and small tensors. A rank on another path is found there, and named.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from ddp_patch.errors import MissingRanksError, RankMismatchError
from ddp_patch.loaders.hooks import script_line
from ddp_patch.ranks.exchange import by_value, ranks_text
from ddp_patch.running.alike import asked
from ddp_patch.running.trees import apart
from ddp_patch.validation import counted

# The lengths of the numbers, and of small tensors, in the block that begins an exchange.
_HEADER, _ROOM = 48, 2**16  # in bytes; numbers of any dtype may begin at 48
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NOTHING = torch.empty(0, dtype=torch.uint8)
# What errors tell the user to look for.
_SAME_STEPS = (
    "let nothing that the script does follow from what differs between the ranks: a clock, the process's number, or "
    "random numbers that nobody has seeded."
)


class GivenUp(BaseException):
    """Ends a divided call on every rank, because the part of one rank has failed."""

    def __init__(self, why: str = "a part of it raises an error on another rank") -> None:
        super().__init__(why)


def _exchange(exchanges: Callable[..., Any]) -> Any:
    """Mark the time that a method runs: tensors that are made meanwhile belong to an exchange."""

    @wraps(exchanges)
    def call(self: "Lockstep", *args: Any, **options: Any) -> Any:
        before, self.is_exchanging = self.is_exchanging, True
        try:
            return exchanges(self, *args, **options)
        finally:
            self.is_exchanging = before

    return call


class Lockstep:
    """The exchanges of a rank with the other ranks. A rank is alone until it joins a process group.

    Attributes:
        rank: The number of this rank.
        ranks: The number of ranks.
        calls: How many calls of modules the script has made.
        steps: How many steps the optimizers have made.
        is_exchanging: Whether an exchange runs. Threads of the process group may hold its tensors for a moment longer.
    """

    def __init__(self) -> None:
        self.rank: int = 0
        self.ranks: int = 1
        self.calls: int = 0
        self.steps: int = 0
        self.is_exchanging: bool = False
        self._exchanges = 0
        self._timeout = 0.0
        self._group: Any = None

    def join(self, timeout: float) -> None:
        """Join the ranks of the process group.

        Args:
            timeout: How many seconds a rank waits for the others.
        """
        self.rank, self.ranks, self._timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    @property
    def done(self) -> str:
        """How far the script is, in words."""
        return f"after {self.calls} calls of modules and {counted(self.steps, 'optimizer step')}"

    def meet(self, doing: str, usual: object = 0, *, has_failed: bool = False) -> bool:
        """Wait for all ranks, and return whether ``usual`` is the same on each; see ``gather``."""
        return self.gather(doing, _NOTHING, usual, has_failed=has_failed) is not None

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks. JSON must be able to write a value."""
        flat = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(row.tolist())) for row in self.gather("compares what the ranks have", flat) or ()]

    def of_rank_0(self, find: Callable[[], Any]) -> Any:
        """Call a function on rank 0, and return its result on every rank."""
        return self.gathered(find() if self.rank == 0 else None)[0]

    def agreed(self, why: str) -> str:
        """Return the reason of the lowest rank that has one; empty if none has."""
        return next(filter(None, self.gathered(why)), "")

    @_exchange
    def gather(
        self, doing: str, flat: torch.Tensor, usual: object = 0, *, has_failed: bool = False
    ) -> list[torch.Tensor] | None:
        """Wait for all ranks, and gather their bytes.

        Args:
            doing: What this rank does, in words. All ranks must do the same.
            flat: A tensor of bytes with one dimension, of any length.
            usual: Numbers that normally are the same on all ranks; a difference is no error.
            has_failed: Whether the divided call of this rank has failed.

        Returns:
            Each rank's bytes; None if ``usual`` is not the same on every rank.

        Raises:
            GivenUp: The divided call of some rank has failed.
            RankMismatchError: Another rank does something else. Every rank raises this error.
            MissingRanksError: Another rank did not come within the timeout, or has ended.
        """
        if self.ranks == 1:
            return [flat]
        self._exchanges += 1
        goes_along = not flat.is_cuda and flat.numel() <= _ROOM
        done = crc32(f"{self._exchanges} {self.calls} {self.steps}".encode())
        size = flat.numel() if goes_along else -flat.numel()
        numbers = [has_failed, crc32(f"{doing} {asked()}".encode()), done, hash(usual) >> 2, size, 0]
        begin = torch.tensor(numbers, device="cpu").view(torch.uint8)
        rest = [flat, flat.new_empty(_ROOM - flat.numel())] if goes_along else [begin.new_empty(_ROOM)]
        blocks = self._all(torch.cat([begin, *rest]))
        failed, *same, usuals, sizes, _ = zip(
            *(each[:_HEADER].view(torch.int64).tolist() for each in blocks), strict=True
        )
        if any(failed):
            raise GivenUp
        if any(len({*each}) > 1 for each in same):
            raise self._mismatch(doing)
        if len({*usuals}) > 1:
            return None
        if min(sizes) < 0:
            own = flat if not flat.is_cuda or _has_nccl() else flat.cpu()
            blocks = self._all(torch.cat([own, own.new_empty(max(map(abs, sizes)) - len(own))]))
        begins = 0 if min(sizes) < 0 else _HEADER
        return [each[begins:][: abs(size)].to(flat.device) for each, size in zip(blocks, sizes, strict=True)]

    def _all(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks. All have the same length."""
        rows = [torch.empty_like(own) for _ in range(self.ranks)]
        self._together(lambda: dist.all_gather(rows, own, None if own.is_cuda else self._group))
        return rows

    @_exchange
    def sum(self, doing: str, tensors: Sequence[torch.Tensor], usual: object = 0) -> list[torch.Tensor] | None:
        """Add up tensors over all ranks. Their number, shapes and dtypes are the same on every rank.

        Returns:
            The sums, bitwise the same on every rank; None if ``usual`` is not the same on every rank.
        """
        is_small = sum(each.nbytes for each in tensors) <= _ROOM
        if is_small and len({(each.dtype, each.is_cuda) for each in tensors}) == 1:
            flat = _flat(tensors)
            rows = self.gather(doing, flat.view(torch.uint8), usual)
            return rows and _parts(torch.stack([row.view(flat.dtype) for row in rows]).sum(0), tensors)
        return self._in_flat(tensors, dist.all_reduce) if self.meet(doing, usual) else None

    def _in_flat(self, tensors: Sequence[torch.Tensor], communicate: Callable[[torch.Tensor], object]) -> list[Any]:
        """Communicate one flat copy of the tensors of each device and dtype, and return the results in their shapes."""
        found: list[Any] = [*tensors]
        for kind in dict.fromkeys((each.device, each.dtype) for each in tensors):
            places = [at for at, each in enumerate(tensors) if (each.device, each.dtype) == kind]
            held = [tensors[at] for at in places]
            flat = _flat(held)
            self._together(partial(communicate, flat))
            for at, part in zip(places, _parts(flat, held), strict=True):
                found[at] = part
        return found

    def _together(self, communicate: Callable[[], object]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            raise MissingRanksError(
                f"At {script_line(sys._getframe())}, {self.done}, rank {self.rank} waited for the others, at most "
                f"{self._timeout:g} s, and some did not come ({str(error).splitlines()[0]}). If one has ended, its own "
                f"error says why. If not: {_SAME_STEPS}"
            ) from None

    def _mismatch(self, doing: str) -> RankMismatchError:
        world = f", after {asked()}" if asked() else ""
        texts = [f"{doing} at {script_line(sys._getframe())}, {self.done}{world}"] * self.ranks
        self._together(lambda: dist.all_gather_object(texts, texts[0], self._group))
        rows = by_value(dict(enumerate(texts)))
        listed = "".join(f"\n  {ranks_text(ranks)} {row}" for row, ranks in rows.items())
        return RankMismatchError(
            f"The ranks no longer do the same:{listed}\nEvery rank runs the whole script: {_SAME_STEPS}"
        )

    def require_alike(self, doing: str, named: Iterable[tuple[str, torch.Tensor]], close: float) -> list[torch.Tensor]:
        """Compare tensors with those of rank 0.

        Args:
            doing: What this rank does, in words.
            named: The names and the tensors.
            close: The largest difference that is allowed, divided by the norm of rank 0's tensor.

        Returns:
            The tensors of rank 0 if a bit differs; otherwise an empty list.

        Raises:
            RankMismatchError: A difference is larger. Or as ``gather``.
            MissingRanksError: As ``gather``.
        """
        names, tensors = [*zip(*named, strict=True)] or [(), ()]
        if self.ranks == 1 or self.meet(doing, tuple(map(_checksum, tensors))):
            return []
        firsts = self._in_flat(tensors, lambda flat: dist.broadcast(flat.view(torch.uint8), 0))
        of_ranks = self.gathered([apart(first, own) for first, own in zip(firsts, tensors, strict=True)])
        for name, *found in zip(names, *of_ranks, strict=True):
            if max(found) > close:
                where = found.index(max(found))
                raise RankMismatchError(
                    f"The ranks no longer do the same: when each {doing}, {name} of rank {where} is {found[where]:.1e} "
                    f"of its norm apart from rank 0's, {self.done}. Every rank runs the whole script: {_SAME_STEPS}"
                )
        return firsts


def _has_nccl() -> bool:
    return dist.is_nccl_available() and "nccl" in str(dist.get_backend(dist.group.WORLD))


def _checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the bits of a dense tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    return int(flat.view(_WHOLE_NUMBERS.get(flat.element_size(), torch.int64)).sum(dtype=torch.int64))


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _parts(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
