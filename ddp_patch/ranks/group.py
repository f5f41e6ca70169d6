"""One CPU group for each set of ranks: made when they first send each other data, and kept.

It is a gloo group of these ranks alone, so it works beside any backend. Its ranks exchange their addresses in one
meeting, and connect when they first send: a rank of W has connections to about 2 log W others, in rounds of messages
that double.
"""

import atexit
import os
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import gather_in_background, gloo_group, sum_in_background
from ddp_patch.errors import DDPPatchError, MissingRanksError
from ddp_patch.ranks.exchange import exchange, ranks_text

__all__ = ["Group", "closed_at_exit", "kept_groups", "made_group", "unreachable"]

T = TypeVar("T")

# Tags of messages: rows that are gathered, values that are handed over, and nothing.
_ROWS, _VALUES, _NOTHING = 0, 1, 2**30

# What runs in the background may wait for some steps: whoever waits for it has the deadline.
_BACKGROUND = timedelta(days=1)

# The groups of each set of ranks, by the process group that the training has: they go with it.
_kept: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], list["Group"]]] = weakref.WeakKeyDictionary()
_open: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()


class Group:
    """A gloo group of some ranks, which are numbered as they are sorted.

    Its collectives belong to one pass at a time, which borrows it. Rows are gathered by messages with a tag of their
    own, so they may be gathered in the midst of such a pass.

    Args:
        gloo: The group itself.
        addresses: Its store, which it asks when it first connects to a rank.
        ranks: The global ranks, sorted.
        index: This rank's number among them.

    Attributes:
        name: A name that no other group has.
        begun: How many collectives this rank has begun: ranks that have begun equally many can go on with the next.
        is_lent: Whether a pass has borrowed it.
    """

    def __init__(self, gloo: Any, addresses: "_Addresses", ranks: Sequence[int], index: int) -> None:
        self.name: str = addresses.name
        self.ranks: Sequence[int] = ranks
        self.index: int = index
        self.begun: int = 0
        self.is_lent: bool = False
        self._gloo, self._addresses, self._process = gloo, addresses, os.getpid()

    @property
    def _open(self) -> Any:
        if self._gloo is None:
            raise RuntimeError("the ranks' group was left, as after an error or with the process group")
        return self._gloo

    def gather(self, row: torch.Tensor, rows: torch.Tensor) -> Any:
        """Begin to gather every rank's row in the background, and return the work to wait for."""
        self.begun += 1
        return gather_in_background(self._open, row, rows, _BACKGROUND)

    def sum(self, values: torch.Tensor) -> Any:
        """Begin to sum values over the ranks, in place and in the background, and return the work to wait for."""
        self.begun += 1
        return sum_in_background(self._open, values, _BACKGROUND)

    def send(self, data: torch.Tensor, index: int) -> Any:
        """Begin to send bytes to a rank, and return the work to wait for."""
        return self._open.send([data], index, _VALUES)

    def receive(self, into: torch.Tensor, index: int) -> None:
        """Wait for bytes that a rank sends."""
        self._open.recv([into], index, _VALUES).wait()

    def is_closed_by(self, index: int) -> bool:
        """Return whether the connection to a rank is closed, as far as is known without waiting."""
        try:
            self._open.send([torch.empty(1)], index, _NOTHING)
        except RuntimeError:
            return True
        return False

    def all_gather(self, own: torch.Tensor, sizes: Sequence[int], timeout: float) -> list[torch.Tensor]:
        """Return every rank's bytes on every rank, in log2 W rounds.

        Args:
            own: This rank's.
            sizes: How many bytes each rank has.
            timeout: How many seconds to wait in a round. After that, all connections of this group are broken.

        Raises:
            RuntimeError: A connection failed, or a rank did not come in time.

        Source:
            Bruck et al., Efficient Algorithms for All-to-All Communications (1997): concatenation.
        """
        held, ends = self._room(own, sizes)
        have, ranks = 1, len(sizes)
        while have < ranks:
            more = min(have, ranks - have)
            self._swap(held[: ends[more]], self.index - have, held[ends[have] : ends[have + more]], have, timeout)
            have += more
        blocks = torch.split(held, [end - begin for begin, end in pairwise(ends)])
        return [*blocks[ranks - self.index :], *blocks[: ranks - self.index]]

    def gather_on(
        self, target: int, own: torch.Tensor, sizes: Sequence[int], timeout: float
    ) -> list[torch.Tensor] | None:
        """Return every rank's bytes on one rank, by a binomial tree, and None on the others.

        Args:
            target: The number of the rank that gets them.
            own: This rank's.
            sizes: How many bytes each rank has.
            timeout: As of ``all_gather``.

        Raises:
            RuntimeError: As of ``all_gather``.
        """
        held, ends = self._room(own, sizes)
        have, ranks, place = 1, len(sizes), (self.index - target) % len(sizes)
        nothing = held[:0]
        while have < ranks:
            if place & have:
                self._swap(held[: ends[min(have, ranks - place)]], self.index - have, nothing, 0, timeout)
                return None
            if (more := min(have, ranks - place - have)) > 0:
                self._swap(nothing, 0, held[ends[have] : ends[have + more]], have, timeout)
            have *= 2
        blocks = torch.split(held, [end - begin for begin, end in pairwise(ends)])
        return [*blocks[ranks - target :], *blocks[: ranks - target]]

    def _room(self, own: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Return room for all bytes, with this rank's first and those of the ranks after it behind, and their ends."""
        ends = [0, *accumulate([*sizes[self.index :], *sizes[: self.index]])]
        held = torch.empty(ends[-1], dtype=torch.uint8, device="cpu")
        held[: ends[1]] = own
        return held, ends

    def _swap(self, sent: torch.Tensor, to: int, came: torch.Tensor, after: int, timeout: float) -> None:
        """Send bytes to a rank, and receive others from the rank that is so many numbers after this one."""
        works, ranks = [], len(self.ranks)
        if len(sent):
            works.append(self._open.send([sent], to % ranks, _ROWS))
        if len(came):
            works.append(self._open.recv([came], (self.index + after) % ranks, _ROWS))
        for work in works[::-1]:
            work.wait(timedelta(seconds=timeout))

    def close(self) -> None:
        """Break all connections where something is still on its way, so that nobody waits for it, and leave."""
        if self._gloo is not None and self._process == os.getpid():
            # gloo breaks all connections when a time is over, on one that is not broken yet.
            ranks = len(self.ranks)
            any(self._times_out((self.index + after) % ranks) for after in range(1, ranks))
            self._gloo = None

    def _times_out(self, index: int) -> bool:
        """Wait a moment for a rank, which sends nothing; return whether that is what ended it."""
        try:
            self._gloo.recv([torch.empty(1)], index, _NOTHING).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            return "Timed out" in str(error)
        return False


def kept_groups(members: Sequence[int]) -> list[Group]:
    """Return the groups that this rank has of these ranks, in the order in which they were made."""
    world = dist.group.WORLD
    if world is None:  # it was destroyed, and the groups with it
        return []
    if world not in _kept:
        groups = _kept[world] = {}
        weakref.finalize(world, _close_all, groups).atexit = False
    return _kept[world].setdefault(tuple(sorted(members)), [])


def _close_all(groups: dict[tuple[int, ...], list[Group]]) -> None:
    for group in [group for of_ranks in groups.values() for group in of_ranks]:
        group.close()
    groups.clear()


def made_group(members: Sequence[int], doing: str, timeout: float, failure: str = "") -> Group:
    """Meet the other ranks, and return a new group of all.

    Args:
        members: The global ranks, this one among them; the same on each, in any order.
        doing: What they are doing, for errors.
        timeout: How many seconds they wait for each other.
        failure: Why what they did in another group cannot be done again; empty if it can.

    Raises:
        MissingRanksError: A rank did not arrive in time, cannot be reached, or says that something failed.
    """
    ranks = tuple(sorted(members))
    index = ranks.index(dist.get_rank())
    addresses = _Addresses(ranks, doing, timeout, failure)
    try:
        gloo = gloo_group(addresses, index, len(ranks), timedelta(seconds=timeout))
    except RuntimeError as error:
        raise addresses.error or unreachable(doing, ranks, f"{error}") from error
    if addresses.error is not None:
        raise addresses.error
    group = Group(gloo, addresses, ranks, index)
    kept_groups(members).append(group)
    return group


class _Addresses(dist.Store):  # type: ignore[name-defined, misc]  # torch documents it, and its stubs lack it
    """The addresses of all ranks, which gloo asks for one by one: one meeting brings all."""

    def __init__(self, ranks: Sequence[int], doing: str, timeout: float, failure: str) -> None:
        super().__init__()
        self.name: str = ""
        self.error: DDPPatchError | None = None
        self._ranks, self._doing, self._timeout, self._failure = ranks, doing, timeout, failure
        self._of_all: Sequence[str] = ()

    def set(self, key: str, value: bytes) -> None:
        """Tell all others this rank's address, and hear theirs."""
        record = {"address": value.hex(), "failure": self._failure}
        try:
            self.name, self._of_all = exchange(self._ranks, self._doing, record, self._judged, self._timeout)
        except DDPPatchError as error:  # which would lose its class on its way through gloo
            self.error = error.with_traceback(None)
            raise RuntimeError from None

    def _judged(self, records: Mapping[int, Mapping[str, str]]) -> tuple[str, list[str]]:
        if failures := {record["failure"] for record in records.values()} - {""}:
            raise unreachable(self._doing, self._ranks, "; ".join(sorted(failures)))
        return uuid4().hex, [record["address"] for record in records.values()]

    def get(self, key: str) -> bytes:
        """Return the address that a rank has set."""
        return bytes.fromhex(self._of_all[int(key.rpartition("/")[2])])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Do nothing: all are there."""


def unreachable(doing: str, ranks: Sequence[int], why: str) -> MissingRanksError:
    """Return the error of a connection that failed."""
    return MissingRanksError(
        f"{doing}: the connection between {ranks_text(ranks)} failed ({why}). Look for the error of a rank that ended. "
        "If none did, name the network interface by which they reach each other in GLOO_SOCKET_IFNAME, or pass a "
        "longer timeout=."
    )


def closed_at_exit(generator: Generator[T]) -> Generator[T]:
    """Return the generator: it is closed before Python takes its modules apart, if somebody still refers to it then."""
    _open.add(generator)
    return generator


@atexit.register
def _leave() -> None:
    """Leave all passes, then all groups, so that nothing raises or waits for others when this process ends."""
    for generator in [*_open]:
        with suppress(Exception):
            generator.close()
    for groups in [*_kept.values()]:
        _close_all(groups)
