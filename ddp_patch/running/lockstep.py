"""Keep the ranks of a script in lockstep: each exchange begins with who does what, for the how manieth time."""

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.errors import MissingRanksError, RankMismatchError
from ddp_patch.loaders.hooks import script_line
from ddp_patch.ranks.exchange import by_value, ranks_text
from ddp_patch.running.alike import asked
from ddp_patch.validation import counted

# As many bytes are sent at once, as in DistributedDataParallel.
_BUCKET = 25 * 2**20
# An exchange begins with a block of equal length on every rank: numbers, and what is small enough to go along.
_HEADER, _ROOM = 48, 2**14  # in bytes; a tensor of any dtype may begin after the header
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# What errors say that ranks part by.
_SAME_STEPS = (
    "let nothing that the script does follow from what differs between the ranks: a clock, the process's number, or "
    "random numbers that nobody has seeded."
)


class GivenUp(BaseException):
    """A call by parts was given up, because some rank's part of it has failed."""

    def __init__(self, why: str = "a part of it raises an error on another rank") -> None:
        super().__init__(why)


class Lockstep:
    """Compares what the ranks do next, each time before they communicate. A rank is alone until it joins others.

    Attributes:
        rank: This rank.
        ranks: How many there are.
        calls: How many calls of modules the script has made.
        steps: How many steps its optimizers made.
        is_exchanging: Whether this rank is within an exchange.
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
        """What the script has done so far, in words."""
        return f"after {self.calls} calls of modules and {counted(self.steps, 'optimizer step')}"

    # ---- what every exchange begins with ----

    def meet(self, doing: str, usual: object = 0, *, has_failed: bool = False) -> bool:
        """Wait until every rank does the same.

        Args:
            doing: What this rank does, in words.
            usual: Numbers that may differ.
            has_failed: Whether this rank's attempt has failed.

        Returns:
            Whether ``usual`` is the same on every rank.

        Raises:
            GivenUp: The attempt of some rank has failed.
            RankMismatchError: Another rank does something else; every rank raises it.
            MissingRanksError: Another rank did not come within the timeout, or has ended.
        """
        with self._exchanging():
            return self.ranks == 1 or self._begin(doing, usual, torch.empty(0, dtype=torch.uint8), has_failed)[1]

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Say, while entered, that new tensors are the exchange's, whose threads may hold them for a moment."""
        before, self.is_exchanging = self.is_exchanging, True
        try:
            yield
        finally:
            self.is_exchanging = before

    def _begin(
        self, doing: str, usual: object, flat: torch.Tensor, has_failed: bool = False
    ) -> tuple[list[torch.Tensor], bool, list[int]]:
        """Meet, and send what is small; return each rank's, or nothing; whether ``usual`` is alike; and each's size."""
        self._exchanges += 1
        goes_along = not flat.is_cuda and flat.numel() <= _ROOM
        size = flat.numel() if goes_along else -flat.numel()
        done = crc32(f"{self._exchanges} {self.calls} {self.steps}".encode())
        numbers = [has_failed, crc32(f"{doing} {asked()}".encode()), done, hash(usual) >> 2, size, 0]
        block = torch.empty(_HEADER + _ROOM, dtype=torch.uint8, device="cpu")
        block[:_HEADER] = torch.tensor(numbers, device="cpu").view(torch.uint8)
        if goes_along:
            block[_HEADER:][:size] = flat
        blocks = [torch.empty_like(block) for _ in range(self.ranks)]
        self._together(lambda: dist.all_gather(blocks, block, self._group))
        failed, *same, usuals, sizes, _ = zip(
            *(each[:_HEADER].view(torch.int64).tolist() for each in blocks), strict=True
        )
        if any(failed):
            raise GivenUp
        if any(len({*each}) > 1 for each in same):
            raise self._mismatch(doing)
        gone = [each[_HEADER:][:size] for each, size in zip(blocks, sizes, strict=True)] if min(sizes) >= 0 else []
        return gone, len({*usuals}) == 1, [abs(each) for each in sizes]

    # ---- what is exchanged ----

    def gathered(self, value: Any) -> list[Any]:
        """Return each rank's value, which JSON can write."""
        if self.ranks == 1:
            return [value]
        flat = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(row.tolist())) for row in self.gather("compares what the ranks have", flat) or ()]

    def gather(self, doing: str, flat: torch.Tensor, usual: object = 0) -> list[torch.Tensor] | None:
        """Return each rank's flat tensor of bytes, as long as that is; None if ``usual`` is not the same on all."""
        with self._exchanging():
            gone, is_alike, sizes = self._begin(doing, usual, flat)
            if gone or not is_alike:
                return gone if is_alike else None
            own = flat if not flat.is_cuda or _has_nccl() else flat.cpu()
            padded = own.new_empty(max(sizes))
            padded[: len(own)] = own
            rows = [torch.empty_like(padded) for _ in range(self.ranks)]
            self._together(lambda: dist.all_gather(rows, padded, None if padded.is_cuda else self._group))
            return [row[:size].to(flat.device) for row, size in zip(rows, sizes, strict=True)]

    def sum(self, doing: str, tensors: Sequence[torch.Tensor], usual: object = 0) -> list[torch.Tensor] | None:
        """Return the sums over all ranks of tensors that have the same shapes, dtypes and order on every rank.

        Returns:
            The sums, the same to the bit on every rank; None if ``usual`` is not the same on every rank.
        """
        with self._exchanging():
            is_small = sum(each.nbytes for each in tensors) <= _ROOM
            if is_small and len({(each.dtype, each.is_cuda) for each in tensors}) == 1:
                flat = _flat(tensors)
                rows = self.gather(doing, flat.view(torch.uint8), usual)
                return rows and _parts(torch.stack([row.view(flat.dtype) for row in rows]).sum(0), tensors)
            is_alike = self.meet(doing, usual)
            return list(self._reduced(tensors, lambda flat: dist.all_reduce(flat))) if is_alike else None

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of any dtypes as rank 0 has them. They have the same shapes and order on every rank."""
        with self._exchanging():
            return list(self._reduced(tensors, lambda flat: dist.broadcast(flat.view(torch.uint8), 0)))

    def _reduced(
        self, tensors: Sequence[torch.Tensor], communicate: Callable[[torch.Tensor], object]
    ) -> Iterator[torch.Tensor]:
        """Return what becomes of tensors that are communicated in flat copies of several each."""
        found: dict[int, torch.Tensor] = {}
        for places in _buckets(tensors):
            held = [tensors[at] for at in places]
            flat = _flat(held)
            self._together(partial(communicate, flat))
            found |= dict(zip(places, _parts(flat, held), strict=True))
        return (found[at] for at in range(len(tensors)))

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

    # ---- what stays alike ----

    def require_alike(self, doing: str, named: Iterable[tuple[str, torch.Tensor]], close: float) -> list[torch.Tensor]:
        """Meet, and return how far tensors were from rank 0's where they are not the same to the bit.

        Args:
            doing: What this rank does, in words.
            named: The tensors, with their names.
            close: How far they may be, as a part of their norm.

        Returns:
            Rank 0's tensors, if some differ; else none.

        Raises:
            RankMismatchError: They are further apart. Or as ``meet``.
            MissingRanksError: As ``meet``.
        """
        names, tensors = [*zip(*named, strict=True)] or [(), ()]
        if self.ranks == 1 or self.meet(doing, tuple(checksums(tensors))):
            return []
        firsts = self.broadcast(tensors)
        far = [apart(first, own) for first, own in zip(firsts, tensors, strict=True)]
        of_ranks = self.gathered(far)
        for at, name in enumerate(names):
            found = [each[at] for each in of_ranks]
            if max(found) > close:
                where = found.index(max(found))
                raise RankMismatchError(
                    f"The ranks no longer do the same: when each {doing}, {name} of rank {where} is {found[where]:.1e} "
                    f"of its norm apart from rank 0's, {self.done}. Every rank runs the whole script: {_SAME_STEPS}"
                )
        return firsts


def apart(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """Return how far two tensors are apart, as a part of the first one's norm; infinity if one is no such tensor.

    Args:
        a: One.
        b: The other one.
        least: What the norm is taken for if it is less.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not torch.equal(a.detach().isfinite(), b.detach().isfinite()):
        return float("inf")
    far = float((_finite(a) - _finite(b)).norm())
    return far / max(norm_of(a), least, 1e-300) if far else 0.0


def norm_of(tensor: torch.Tensor) -> float:
    """Return the norm of a tensor's finite numbers."""
    return float(_finite(tensor).norm())


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    return torch.where(wide.isfinite(), wide, 0)


def _has_nccl() -> bool:
    return dist.is_nccl_available() and "nccl" in str(dist.get_backend(dist.group.WORLD))


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each dense tensor that is the same where all its bits are."""
    sums = []
    with torch.no_grad():
        for tensor in tensors:
            flat = tensor.detach().contiguous().reshape(-1)
            numbers = flat.view(_WHOLE_NUMBERS.get(flat.element_size(), torch.int64))
            sums.append(numbers.sum(dtype=torch.int64).cpu())
    return torch.stack(sums).tolist() if sums else []


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield the places of tensors that are sent together."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(at)
    for alike in kinds.values():
        ends = np.cumsum([tensors[at].nbytes for at in alike])
        for _, bucket in groupby(zip((ends - 1) // _BUCKET, alike, strict=True), key=itemgetter(0)):
            yield [at for _, at in bucket]


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _parts(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def seed_all(seed: int | None) -> None:
    """Seed the global generators of Python, numpy and torch; None for a seed of the system's entropy."""
    random.seed(seed)
    np.random.seed(None if seed is None else seed % 2**32)
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)
