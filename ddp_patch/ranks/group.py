"""CPU groups of ranks: made when the ranks first exchange data, kept, and used by one pass after the other.

Each group is a gloo group, so it works beside any backend. Two ranks connect when they first send each other data.
Messages go in rounds of doubling distance, so a rank of W has connections to about 2 log W others.

Rows are gathered in a group of their own. A pass whose ranks communicate in its steps opens a channel over another
group: each rank sends numbers to all ranks, and may send values to one rank. A rank's last row says that it takes no
more batches. A rank that fails stores the reason in the process group's store, and breaks its connections. A rank with
a broken connection reports in the store that it is there, and waits for the other ranks' reports. Ranks without a
report are missing.
"""

import atexit
import json
import os
import weakref
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate, count
from time import monotonic, sleep
from typing import Any, Literal, TypeAlias, TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store, gather_in_background, gloo_group
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError, message_of
from ddp_patch.ranks.exchange import (
    MARGIN_S,
    exchange,
    packed,
    ranks_text,
    refusal,
    require_same,
    store_reached,
    unpacked,
)
from ddp_patch.validation import counted

T = TypeVar("T")
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

# Tags of messages: data; and a tag that no message has.
_DATA, _NOTHING = 0, 2**30

# A part of gloo's error on a rank that waited in vain. Other ranks find broken connections.
_TIMED_OUT = "Timed out"
# A rank's report of a connection that failed: the rank waited in vain; or it came, and found the connection broken.
_IN_VAIN, _BROKEN = "in vain", "broken"

# How many seconds the last row of a pass may be on its way: other ranks may end the pass much later.
_LAST_ROW_S = 86_400.0

# How many seconds pass before a rank reads the other ranks' reports again.
_AGAIN_S = 0.05

# Groups by their ranks, in order, and their purpose.
_Kept: TypeAlias = dict[tuple[tuple[int, ...], Literal["rows", "steps"]], list["Group"]]

# The groups by the training's process group: they are closed when it is destroyed.
_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()

_open: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()

_numbers = count()  # of groups, by which their names are in the order in which the groups were made


class Group:
    """A gloo group of some ranks, which have numbers from 0 within it.

    Args:
        gloo: torch's process group of the backend gloo.
        name: A name that no other group has.
        ranks: The global ranks, in order.
        index: This rank's number in the group.
    """

    def __init__(self, gloo: Any, name: str, ranks: Sequence[int], index: int) -> None:
        self.name: str = name
        self.ranks: Sequence[int] = ranks
        self.index: int = index
        self._gloo, self._store, self._process = gloo, default_store(), os.getpid()
        self._connected: set[int] = set()  # the numbers of the ranks to which this rank has a connection
        self._has_said = False

    @property
    def _words(self) -> str:
        """The key for the first failing rank's reason, and for the reports of the other ranks."""
        return f"ddp_patch/words/{self.name}"

    @property
    def is_closed(self) -> bool:
        """Whether this rank has broken its connections."""
        return self._gloo is None

    @property
    def _open(self) -> Any:
        if self.is_closed:
            raise RuntimeError("the ranks' group was left, as after an error or with the process group")
        return self._gloo

    def gather(self, row: torch.Tensor, rows: torch.Tensor, timeout: float) -> Any:
        """Begin to gather every rank's row in the background, and return the work to wait for."""
        self._connected |= {(self.index + away) % len(self.ranks) for away in (-1, 1)}  # gloo gathers in a ring
        return gather_in_background(self._open, row, rows, timedelta(seconds=timeout))

    def send(self, data: torch.Tensor, index: int) -> Any:
        """Begin to send bytes to a rank, and return the work to wait for."""
        self._connected.add(index)
        return self._open.send([data], index, _DATA)

    def receive(self, into: torch.Tensor, index: int) -> Any:
        """Begin to receive bytes that a rank sends, and return the work to wait for."""
        self._connected.add(index)
        return self._open.recv([into], index, _DATA)

    def all_gather(
        self, doing: str, own: Bytes, sizes: Sequence[int], timeout: float, *, meets: bool = False
    ) -> list[Bytes]:
        """Return every rank's bytes on every rank, in log2 W rounds.

        Args:
            doing: What the ranks are doing, for errors.
            own: This rank's bytes.
            sizes: How many bytes each rank has.
            timeout: How many seconds to wait in each round.
            meets: Whether this is the first exchange of an operation. Then a rank that finds broken connections, of
                ranks that waited in vain, has come too late.

        Raises:
            RankMismatchError: A rank has failed.
            MissingRanksError: A rank did not come in time.

        Source:
            Bruck et al., Efficient Algorithms for All-to-All Communications (1997): concatenation.
        """
        # This rank's bytes come first, then the bytes of the ranks after it.
        ends = [0, *accumulate([*sizes[self.index :], *sizes[: self.index]])]
        held = torch.empty(ends[-1], dtype=torch.uint8, device="cpu")
        held[: ends[1]] = torch.from_numpy(own)
        have, ranks = 1, len(sizes)
        while have < ranks:
            more = min(have, ranks - have)
            sent, came = held[: ends[more]], held[ends[have] : ends[have + more]]
            with self.explained(doing, meets=meets and have == 1):
                works = [self.receive(came, (self.index + have) % ranks)] if len(came) else []
                works += [self.send(sent, (self.index - have) % ranks)] if len(sent) else []
            with self.explained(doing):
                for work in works:
                    work.wait(timedelta(seconds=timeout))
            have += more
        blocks = np.split(held.numpy(), ends[1:-1])
        return [*blocks[ranks - self.index :], *blocks[: ranks - self.index]]

    @contextmanager
    def explained(self, doing: str, *, meets: bool = False) -> Iterator[None]:
        """While entered, explain a connection that fails by an error, and close the group; see ``all_gather``."""
        try:
            yield
        except RuntimeError as error:  # gloo's errors
            failure = self._failure(doing, error, meets=meets)
            self.close()
            try:
                raise failure from error
            finally:
                # Otherwise the error would refer to its traceback, and the traceback to the connections. If a forked
                # worker collected these connections, their threads would end the worker.
                del failure

    def _failure(self, doing: str, error: RuntimeError, *, meets: bool) -> DDPPatchError:
        """Return the error of a failed connection: why the first rank failed, or which ranks are late or missing."""
        store, here, until = self._store, f"{self._words}/here", monotonic() + MARGIN_S
        with store_reached(doing):
            self._has_said = True
            met = _IN_VAIN if _TIMED_OUT in f"{error}" else _BROKEN if meets else ""
            store.set(f"{here}/{self.ranks[self.index]}", met)
            reports = store.add(here, 1)
            while not store.check([self._words]):
                if reports == len(self.ranks) or monotonic() > until:
                    keys = {rank: f"{here}/{rank}" for rank in self.ranks if store.check([f"{here}/{rank}"])}
                    all_met = {rank: store.get(key).decode() for rank, key in keys.items()}
                    late = [rank for rank, met in all_met.items() if met == _BROKEN and _IN_VAIN in all_met.values()]
                    missing = [rank for rank in self.ranks if rank not in all_met]
                    return _unreachable(doing, self.ranks, f"{error}", missing, late)
                sleep(_AGAIN_S)
                reports = store.add(here, 0)
            rank, why = json.loads(store.get(self._words))
        return refusal(doing, {rank: why})

    def close(self, why: str = "") -> None:
        """Close the group, and break all of its connections, so that no rank waits for data on their way.

        Args:
            why: The reason for the other ranks; empty if they get none.
        """
        if not self.is_closed and self._process == os.getpid():
            if why and not self._has_said:
                with suppress(RuntimeError):  # the store may be gone
                    self._store.compare_set(self._words, "", json.dumps([self.ranks[self.index], why]))
            # gloo breaks all connections of a group if one of them times out. So let one time out. Only connected ranks
            # are asked: connecting to a rank that has ended would take the group's whole timeout.
            any(map(self._times_out, sorted(self._connected)))
            self._gloo = None

    def _times_out(self, index: int) -> bool:
        """Wait a moment for a message that is never sent; return whether the wait timed out."""
        try:
            self._gloo.recv([torch.empty(1)], index, _NOTHING).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            return _TIMED_OUT in str(error)
        return False


def kept_groups(members: Sequence[int], purpose: Literal["rows", "steps"]) -> list[Group]:
    """Return this rank's groups of some ranks for a purpose, in the order of making, without those that passes use."""
    world = dist.group.WORLD
    if world is None:  # the process group was destroyed, and so were its groups
        return []
    if world not in _kept:
        kept: _Kept = {}
        _kept[world] = kept
        weakref.finalize(world, _close_all, kept).atexit = False
    groups = _kept[world].setdefault((tuple(members), purpose), [])
    groups[:] = sorted((group for group in groups if not group.is_closed), key=lambda group: group.name)
    return groups


def _close_all(kept: _Kept) -> None:
    while kept:
        for group in kept.popitem()[1]:
            group.close()


def made_group(members: Sequence[int], doing: str, timeout: float) -> Group:
    """Synchronise with the other ranks, and return a new group of all.

    Args:
        members: The global ranks of the group, with this rank; in the same order on each rank.
        doing: What the ranks are doing, for errors.
        timeout: How many seconds the ranks wait for each other.

    Raises:
        MissingRanksError: A rank did not arrive in time, or cannot be reached.
    """
    index = members.index(dist.get_rank())
    name: str = exchange(members, doing, None, lambda _: f"{next(_numbers):06} {uuid4().hex}", timeout)
    addresses = dist.PrefixStore(f"ddp_patch/group/{name}", default_store())  # type: ignore[attr-defined]  # torch documents it
    try:
        gloo = gloo_group(addresses, index, len(members), timedelta(seconds=timeout))
    except RuntimeError as error:
        raise _unreachable(doing, members, f"{error}") from error
    return Group(gloo, name, members, index)


def _unreachable(
    doing: str, ranks: Sequence[int], why: str, missing: Sequence[int] = (), late: Sequence[int] = ()
) -> MissingRanksError:
    """Return the error of a connection that failed, with the missing and the late ranks, if known."""
    told = [f"{ranks_text(missing)} of {list(ranks)} did not come, or ended"] if missing else []
    told += (
        [f"{ranks_text(late)} of {list(ranks)} came after another rank had waited in vain, as long as timeout= says"]
        if late
        else []
    )
    who = "; ".join(told) or f"the connection between {ranks_text(ranks)} failed ({why})"
    return MissingRanksError(
        f"{doing}: {who}. Look for the error of a rank that ended, or for what it does instead. If there is none, pass "
        "a longer timeout=, or name the network interface by which the ranks reach each other in GLOO_SOCKET_IFNAME."
    )


# ---- channels ----


@contextmanager
def opened(
    members: Sequence[int], doing: str, of: str, facts: Mapping[str, object], timeout: float
) -> Iterator["Channel"]:
    """Synchronise with the other members, and open a channel, which is closed when the context is left.

    Args:
        members: The global ranks that take part, with this rank; in the same order on each rank.
        doing: What the ranks are doing, for errors.
        of: The loader, and what the channel carries.
        facts: What must be the same on all ranks.
        timeout: How many seconds the ranks wait for each other.

    Raises:
        RankMismatchError: The facts differ, or a rank refused.
        MissingRanksError: A rank did not arrive in time.
    """
    world, free = dist.group.WORLD, kept_groups(members, "steps")

    def judge(records: Mapping[int, Mapping[str, Any]]) -> bool:
        """Return whether all ranks have the same group free, or none."""
        require_same(doing, {rank: {**record, "group": ""} for rank, record in records.items()})
        return len({record["group"] for record in records.values()}) == 1

    record = {"patched as": of, **facts, "group": free[0].name if free else ""}
    if not exchange(members, doing, record, judge, timeout):
        while free:  # another rank has closed the group, or still uses it
            free.pop().close()
    # Another pass that begins meanwhile takes, or makes, a group of its own.
    group = free.pop(0) if free else made_group(members, doing, timeout)
    channel = Channel(doing, group, timeout)
    try:
        yield channel
    except GeneratorExit:
        channel.leave()
        raise
    except BaseException as error:
        if not channel.is_over:
            group.close(f"{type(error).__name__}: {message_of(error)}")
        raise
    else:
        channel.leave()
    finally:
        if dist.group.WORLD is world:
            kept_groups(members, "steps").append(group)
        else:
            group.close()


class Channel:
    """A connection of all ranks for one pass; see ``opened``.

    Args:
        doing: What the ranks are doing, for errors.
        group: The ranks' group, which no other pass uses.
        timeout: How many seconds the ranks wait for each other.

    Attributes:
        index: This rank's number in the group.
        batches_delivered: How many batches this rank has delivered, for errors.
        is_over: Whether a member has taken its last batch.
    """

    def __init__(self, doing: str, group: Group, timeout: float) -> None:
        self.index: int = group.index
        self.batches_delivered: int = 0
        self.is_over: bool = False
        self._doing, self._group, self._timeout, self._columns = doing, group, timeout, 0

    def gathered(self, row: Sequence[float]) -> list[list[float]]:
        """Send a row of numbers, equally many on each rank, and return all ranks' rows.

        Raises:
            RankMismatchError: A rank has left or failed.
            MissingRanksError: A rank has ended, or sent nothing in time.
        """
        self._columns = len(row)
        with self._group.explained(self._doing):
            work, rows = self._begin([*row, 0], self._timeout)
            work.wait()
        came = rows.tolist()
        if left := {int(said[-1]): rank for rank, said in zip(self._group.ranks, came, strict=True) if said[-1]}:
            self.is_over = True
            raise RankMismatchError(
                f"{self._doing}: {ranks_text([left[min(left)]])} left this pass after "
                f"{counted(min(left) - 1, 'batch')}, and others ask for more. The ranks communicate during a pass, so "
                "it needs all of them. Let every rank take equally many batches: break after the same one on all, or "
                "iterate to the end."
            )
        return [said[:-1] for said in came]

    def leave(self) -> None:
        """Begin to send the last row, which says that this rank takes no more batches."""
        with suppress(RuntimeError):  # the group may be closed
            self._begin([0] * self._columns + [1 + self.batches_delivered], _LAST_ROW_S)

    def _begin(self, row: Sequence[float], timeout: float) -> tuple[Any, torch.Tensor]:
        own = torch.tensor(row, dtype=torch.float64, device="cpu")
        rows = own.new_empty(len(self._group.ranks), len(own))
        return self._group.gather(own, rows, timeout), rows

    def swapped(self, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Send values to some ranks, one each, and return the values that other ranks send to this rank.

        Args:
            given: The values to send, by the receiving rank's number.
            sources: The numbers of the ranks that send a value.
        """
        bodies = {to: torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8) for to, value in given.items()}
        with self._group.explained(self._doing):
            works = []
            for to, body in bodies.items():
                works += [self._group.send(part, to) for part in (torch.tensor([len(body)]).view(torch.uint8), body)]
            came = {source: self._received(source) for source in sources}
            for work in works:
                work.wait()
        return {source: unpacked(body.numpy().data) for source, body in came.items()}

    def _received(self, index: int) -> torch.Tensor:
        size = torch.empty(8, dtype=torch.uint8)
        self._group.receive(size, index).wait()
        body = torch.empty(int(size.view(torch.int64).item()), dtype=torch.uint8)
        self._group.receive(body, index).wait()
        return body


# ---- the end of the process ----


def closed_at_exit(generator: Generator[T]) -> Generator[T]:
    """Return the generator, and close it when Python exits, before modules are removed, if it is still in use then."""
    _open.add(generator)
    return generator


@atexit.register
def _leave() -> None:
    """Leave all passes, then all groups, so that no rank raises an error or waits when this process ends."""
    for generator in [*_open]:
        with suppress(Exception):
            generator.close()
    for groups in [*_kept.values()]:
        _close_all(groups)
