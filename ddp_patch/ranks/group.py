"""CPU groups of ranks: made when they first send each other data, kept, and lent to one pass after the other.

Each is a gloo group of these ranks alone, so it works beside any backend. Its ranks exchange their addresses in one
meeting, and connect when they first send: a rank of W has connections to about 2 log W others, in rounds of messages
that double.

Rows are gathered in a group of their own. A pass whose ranks talk in its steps opens a channel over another: each sends
numbers to all, and may send values to one. A rank that leaves or fails is named to the others.
"""

import atexit
import json
import math
import os
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from time import monotonic
from typing import Any, Literal, TypeAlias, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist

from ddp_patch import errors
from ddp_patch.compat.private_torch import default_store, gather_in_background, gloo_group
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError, message_of
from ddp_patch.ranks.exchange import already_in, exchange, ranks_text, require_same, store_reached
from ddp_patch.ranks.packing import packed, unpacked
from ddp_patch.validation import counted

__all__ = ["Channel", "Group", "closed_at_exit", "kept_groups", "made_group", "opened", "opened_sums"]

T = TypeVar("T")

# Tags of messages: what is sent, and nothing.
_DATA, _NOTHING = 0, 2**30

# Whoever waits for it has the deadline: it looks meanwhile who has left.
_BACKGROUND = timedelta(days=1)

# After so long, a rank that waits looks whether another has left, and says that it waits.
_SLICE_S = 1.0

# Which ranks a group is of, sorted, and what for.
_Kept: TypeAlias = dict[tuple[tuple[int, ...], Literal["rows", "steps"]], list["Group"]]

# The groups by the process group that the training has: they go with it.
_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()

_open: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()


class Group:
    """A gloo group of some ranks, which are numbered as they are sorted.

    A pass borrows it, so that another one that begins before it ends makes a group of its own.

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

    def send(self, data: torch.Tensor, index: int) -> Any:
        """Begin to send bytes to a rank, and return the work to wait for."""
        return self._open.send([data], index, _DATA)

    def receive(self, into: torch.Tensor, index: int) -> None:
        """Wait for bytes that a rank sends."""
        self._open.recv([into], index, _DATA).wait()

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
            works.append(self._open.send([sent], to % ranks, _DATA))
        if len(came):
            works.append(self._open.recv([came], (self.index + after) % ranks, _DATA))
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


def kept_groups(members: Sequence[int], purpose: Literal["rows", "steps"]) -> list[Group]:
    """Return the groups that this rank has of some ranks for a purpose, in the order in which they were made."""
    world = dist.group.WORLD
    if world is None:  # it was destroyed, and the groups with it
        return []
    if world not in _kept:
        kept: _Kept = {}
        _kept[world] = kept
        weakref.finalize(world, _close_all, kept).atexit = False
    return _kept[world].setdefault((tuple(sorted(members)), purpose), [])


def _close_all(kept: _Kept) -> None:
    while kept:
        for group in kept.popitem()[1]:
            group.close()


def made_group(
    members: Sequence[int], purpose: Literal["rows", "steps"], doing: str, timeout: float, failure: str = ""
) -> Group:
    """Meet the other ranks, and return a new group of all, which is kept.

    Args:
        members: The global ranks that it is of, this one among them.
        purpose: What it is for.
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
        raise addresses.error or _unreachable(doing, ranks, f"{error}") from error
    if addresses.error is not None:
        raise addresses.error
    group = Group(gloo, addresses, ranks, index)
    kept_groups(members, purpose).append(group)
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
            raise _unreachable(self._doing, self._ranks, "; ".join(sorted(failures)))
        return uuid4().hex, [record["address"] for record in records.values()]

    def get(self, key: str) -> bytes:
        """Return the address that a rank has set."""
        return bytes.fromhex(self._of_all[int(key.rpartition("/")[2])])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Do nothing: all are there."""


def _unreachable(doing: str, ranks: Sequence[int], why: str) -> MissingRanksError:
    """Return the error of a connection that failed."""
    return MissingRanksError(
        f"{doing}: the connection between {ranks_text(ranks)} failed ({why}). Look for the error of a rank that ended. "
        "If none did, name the network interface by which they reach each other in GLOO_SOCKET_IFNAME, or pass a "
        "longer timeout=."
    )


# ---- channels ----


@contextmanager
def opened(
    members: Sequence[int], doing: str, of: str, facts: Mapping[str, object], timeout: float
) -> Iterator["Channel"]:
    """Synchronise with the other members, open a channel, and close it in the end.

    Args:
        members: The global ranks that take part, this one among them; the same on each.
        doing: What they are doing, for errors.
        of: What it carries, and of which loader.
        facts: What must be the same on all.
        timeout: How many seconds they wait for each other.

    Raises:
        RankMismatchError: The facts differ, or a rank refused.
        MissingRanksError: A rank did not arrive in time.
    """
    free = {group.name: group for group in kept_groups(members, "steps") if not group.is_lent}

    def judge(records: Mapping[int, Mapping[str, Any]]) -> tuple[str, str]:
        """Name the channel, and a group that all ranks have free and in which they have begun equally many."""
        require_same(doing, {rank: {**record, "groups": ""} for rank, record in records.items()})
        first, *others = (record["groups"] for record in records.values())
        alike = (group for group, begun in first.items() if all(other.get(group) == begun for other in others))
        return uuid4().hex, next(alike, "")

    begun = {group: each.begun for group, each in free.items()}
    name, chosen = exchange(members, doing, {"patched as": of, **facts, "groups": begun}, judge, timeout)
    if not chosen:
        for group in free.values():  # in which a rank has begun what others have not
            group.close()
            kept_groups(members, "steps").remove(group)
    group = free[chosen] if chosen else made_group(members, "steps", doing, timeout)
    channel = Channel(members, doing, name, group, timeout)
    try:
        yield channel
    except BaseException as error:
        channel.leave(error)
        raise
    else:
        channel.close()


@contextmanager
def opened_sums(
    members: Sequence[int], doing: str, of: str, facts: Mapping[str, object], timeout: float
) -> Iterator["Channel"]:
    """Open a channel over which ranks sum in each step, as long as one of them has steps; see ``opened``."""
    with opened(members, doing, of, facts, timeout) as channel:
        yield channel
        while channel.go_on:
            channel.sum_over_ranks(0.0, is_step=False)


class Channel:
    """See ``opened``. Members are numbered from 0.

    Args:
        members: The global ranks that take part.
        doing: What they are doing, for errors.
        name: A name that no other channel has.
        group: Of these ranks, which nobody else has borrowed.
        timeout: How many seconds they wait for each other.

    Attributes:
        index: This rank's number among the members.
        batches_delivered: How many batches this rank has given, for errors.
        go_on: Whether a rank may have another step, where they sum over steps.
    """

    def __init__(self, members: Sequence[int], doing: str, name: str, group: Group, timeout: float) -> None:
        self.index: int = members.index(dist.get_rank())
        self.batches_delivered: int = 0
        self.go_on: bool = True
        self._members, self._doing, self._name, self._group, self._timeout = members, doing, name, group, timeout
        self._in_group = [group.ranks.index(member) for member in members]
        self._sends: list[tuple[int, Any]] = []
        self._store: Any = default_store()
        # Who left first, and why: the group's next channel writes over it. Who waits for which gather.
        self._left = f"ddp_patch/words/{group.name}"
        self._waits = [f"ddp_patch/waits/{group.name}/{index}" for index in range(len(members))]
        group.is_lent = True

    def gathered(self, row: Sequence[int]) -> list[list[int]]:
        """Send a row of numbers, equally many on each member, and return all members' rows; see ``_wait``."""
        rows: list[list[int]] = self._rows(torch.tensor(row, dtype=torch.int64, device="cpu")).tolist()
        return rows

    def _rows(self, row: torch.Tensor) -> torch.Tensor:
        rows = row.new_empty(len(self._members), len(row))
        self._wait(self._group.gather(row, rows))
        return rows[self._in_group]

    def sum_over_ranks(self, value: float, *, is_step: bool = True) -> float:
        """Return the sum of all ranks' values of a step; ranks may make different numbers of steps.

        Args:
            value: This rank's.
            is_step: Whether this rank has a step, or takes part in the others'.

        Raises:
            RankMismatchError: A rank broke off or failed.
            MissingRanksError: A rank did not come to this step in time.
        """
        row = torch.tensor([value, is_step], dtype=torch.float64, device="cpu")
        total, steps = self._rows(row).sum(0).tolist()
        self.go_on = steps > 0
        self.batches_delivered += is_step
        return float(total)

    def _wait(self, work: Any) -> None:
        """Wait until all members have sent what was begun.

        Args:
            work: What was begun.

        Raises:
            RankMismatchError: A rank has left or failed.
            MissingRanksError: A rank has ended, or sent nothing in time.
        """
        begun = looked = monotonic()
        wait_s = min(_SLICE_S, self._timeout / 4)
        while not self._has_come(work, wait_s):
            if (now := monotonic()) < looked + wait_s / 2:
                continue
            looked = now
            with store_reached(self._doing):
                self._store.set(self._waits[self.index], f"{self._group.begun}")
                self.require_nobody_left(self._group.begun)
                if now > begun + self._timeout:
                    waiting = already_in(self._store, dict(enumerate(self._waits)))
                    missing = [at for at in range(len(self._waits)) if int(waiting.get(at, 0)) != self._group.begun]
                    raise self._missing(f"did not ask for the next batch within {self._timeout:g} s", missing)

    def _has_come(self, work: Any, seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:  # the time is over, or the connection failed
            if not work.is_completed():
                return False
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error, self._closed()) from error
        return True

    def send(self, target: int, value: Any) -> None:
        """Begin to send a value to a member, which receives it."""
        body = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8)
        with self._connected(target):
            for message in (torch.tensor([len(body)]).view(torch.uint8), body):
                self._sends.append((target, self._group.send(message, self._in_group[target])))

    def all_sent(self) -> None:
        """Wait until all that was sent has left this rank."""
        for target, work in self._sends:
            with self._connected(target):
                work.wait()
        self._sends.clear()

    def receive(self, source: int) -> Any:
        """Return the value that a member sends here."""
        size = torch.empty(8, dtype=torch.uint8)
        with self._connected(source):
            self._group.receive(size, self._in_group[source])
            body = torch.empty(int(size.view(torch.int64).item()), dtype=torch.uint8)
            self._group.receive(body, self._in_group[source])
        return unpacked(body.numpy().data)

    def fail(self, error: BaseException) -> None:
        """Write why this rank cannot continue, before its row tells the others."""
        who = ranks_text([self._members[self.index]])
        text = (
            f"{self._doing}: {who} could not continue.\n  {who}: {type(error).__name__}: {message_of(error)}\n"
            "Correct the error above and start all ranks again."
        )
        self._note(RankMismatchError(text))

    def leave(self, error: BaseException) -> None:
        """Leave before the end, and write why: this rank asks for no more, or cannot continue."""
        has_left = isinstance(error, GeneratorExit)
        if has_left:
            text = (
                f"{self._doing}: {ranks_text([self._members[self.index]])} left this pass after "
                f"{counted(self.batches_delivered, 'batch')}, and others ask for more. The ranks communicate during a "
                "pass, so it needs all of them. Let every rank take equally many batches: break after the same one on "
                "all, or iterate to the end."
            )
            self._note(RankMismatchError(text), self._group.begun)
        else:
            self.fail(error)
        self.close(is_whole=has_left and not self._sends)

    def _note(self, error: DDPPatchError, last: int = -1) -> None:
        """Write what all others are to raise, unless another has written already, or the store is gone.

        Args:
            error: What they raise.
            last: Up to which gather this rank took part.
        """
        note = json.dumps([self._name, last, type(error).__name__, message_of(error)])
        with suppress(RuntimeError):
            before = self._store.get(self._left).decode() if self._store.check([self._left]) else ""
            if self._name not in before:
                self._store.compare_set(self._left, before, note)

    def require_nobody_left(self, gather: float = math.inf) -> None:
        """Raise the error of the member that left first, if one did.

        Args:
            gather: Which gather this rank waits for. A member that left after it is not to blame.
        """
        with store_reached(self._doing):
            if not self._store.check([self._left]):
                return
            name, last, kind, text = json.loads(self._store.get(self._left))
        if name == self._name and gather > last:
            raise getattr(errors, kind)(text)

    def close(self, *, is_whole: bool = True) -> None:
        """Give the group back; where something may still be on its way, break its connections."""
        self._group.is_lent = False
        if not is_whole:
            self._group.close()
            with suppress(ValueError):  # it went with the process group
                kept_groups(self._members, "steps").remove(self._group)
        with suppress(RuntimeError):  # the store may be gone
            self._store.delete_key(self._waits[self.index])

    def _closed(self) -> list[int]:
        """Return the numbers of the members whose connections are closed."""
        others = [index for index in range(len(self._members)) if index != self.index]
        return [index for index in others if self._group.is_closed_by(self._in_group[index])]

    @contextmanager
    def _connected(self, other: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what gloo raises
            raise self._lost(error, [other]) from error

    def _lost(self, error: RuntimeError, suspects: Sequence[int]) -> DDPPatchError:
        """Return the error of a lost connection: what a member wrote, or else who is gone."""
        self.require_nobody_left()
        return self._missing(f"ended, or cannot be reached ({error})", suspects)

    def _missing(self, what: str, indices: Sequence[int]) -> MissingRanksError:
        missing = [self._members[index] for index in indices]
        text = (
            f"{self._doing}: {ranks_text(missing) if missing else 'another rank'} of {list(self._members)} {what}. "
            "Look for the error of that rank, or for what it does instead. If it still works, pass a longer timeout=, "
            "and name the network interface by which the ranks reach each other in GLOO_SOCKET_IFNAME."
        )
        error = MissingRanksError(text)
        self._note(error)
        return error


# ---- the end of the process ----


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
