"""CPU groups of ranks: made when they first send each other data, kept, and lent to one pass after the other.

Each is a gloo group of these ranks alone, so it works beside any backend. Two ranks connect when they first send each
other something: a rank of W has connections to about 2 log W others, in rounds of messages that double.

Rows are gathered in a group of their own. A pass whose ranks talk in its steps opens a channel over another: each sends
numbers to all, and may send values to one. With its last row, a rank says that it asks for no more. A rank that fails
says why in the store and breaks its connections; whoever meets a broken one says that it is there, and looks what the
others say: who says nothing is missing.
"""

import atexit
import json
import os
import weakref
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from time import monotonic, sleep
from typing import Any, Literal, TypeAlias, TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store, gather_in_background, gloo_group
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError, message_of
from ddp_patch.ranks.exchange import MARGIN_S, exchange, ranks_text, refusal, require_same, store_reached
from ddp_patch.ranks.packing import packed, unpacked
from ddp_patch.validation import counted

__all__ = ["Channel", "Group", "closed_at_exit", "kept_groups", "made_group", "opened"]

T = TypeVar("T")
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

# Tags of messages: what is sent, and nothing.
_DATA, _NOTHING = 0, 2**30

# In gloo's text of a rank that waited in vain. Others meet broken connections.
_TIMED_OUT = "Timed out"
# What a rank says of itself where a connection fails: it waited in vain; or it came, and found it broken.
_IN_VAIN, _BROKEN = "in vain", "broken"

# How long the last row of a pass may be on its way: others may come to their end much later.
_LAST_ROW_S = 86_400.0

# After so long, a rank looks again for what the others say.
_AGAIN_S = 0.05

# Which ranks a group is of, in order, and what for.
_Kept: TypeAlias = dict[tuple[tuple[int, ...], Literal["rows", "steps"]], list["Group"]]

# The groups by the process group that the training has: they go with it.
_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()

_open: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()


class Group:
    """A gloo group of some ranks, which are numbered from 0.

    Args:
        gloo: The group itself.
        name: A name that no other group has.
        ranks: The global ranks, in order.
        index: This rank's number among them.

    Attributes:
        is_lent: Whether a pass has borrowed it. Another one that begins before it ends makes a group of its own.
    """

    def __init__(self, gloo: Any, name: str, ranks: Sequence[int], index: int) -> None:
        self.name: str = name
        self.ranks: Sequence[int] = ranks
        self.index: int = index
        self.is_lent: bool = False
        self._gloo, self._store, self._process = gloo, default_store(), os.getpid()
        self._connected: set[int] = set()  # the numbers of the ranks that this one has sent or asked something
        # Where the first rank to fail says why, and the others that they are there.
        self._words, self._has_said = f"ddp_patch/words/{name}", False

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
        self._connected |= {(self.index + away) % len(self.ranks) for away in (-1, 1)}  # gloo's ring
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
            own: This rank's.
            sizes: How many bytes each rank has.
            timeout: How many seconds to wait in a round.
            meets: Whether it begins what the ranks do: who finds connections broken then, of ranks that waited in
                vain, has come too late.

        Raises:
            RankMismatchError: A rank has failed.
            MissingRanksError: A rank did not come in time.

        Source:
            Bruck et al., Efficient Algorithms for All-to-All Communications (1997): concatenation.
        """
        # This rank's come first, those of the ranks after it behind.
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
        """Raise an error of ours where a connection fails, and break all others; see ``all_gather`` for ``meets``."""
        try:
            yield
        except RuntimeError as error:  # what gloo raises
            failure = self._failure(doing, error, meets=meets)
            self.close()
            try:
                raise failure from error
            finally:
                # Or it would hold its own traceback, and that the connections, whose threads end in whichever process
                # collects them: in a worker that is forked meanwhile they end it.
                del failure

    def _failure(self, doing: str, error: RuntimeError, *, meets: bool) -> DDPPatchError:
        """Return the error of a connection that failed: why the first rank failed, or who came late or says nothing."""
        store, here, until = self._store, f"{self._words}/here", monotonic() + MARGIN_S
        with store_reached(doing):
            self._has_said = True
            met = _IN_VAIN if _TIMED_OUT in f"{error}" else _BROKEN if meets else ""
            store.set(f"{here}/{self.ranks[self.index]}", met)
            count = store.add(here, 1)
            while not store.check([self._words]):
                if count == len(self.ranks) or monotonic() > until:
                    keys = {rank: f"{here}/{rank}" for rank in self.ranks if store.check([f"{here}/{rank}"])}
                    all_met = {rank: store.get(key).decode() for rank, key in keys.items()}
                    late = [rank for rank, met in all_met.items() if met == _BROKEN and _IN_VAIN in all_met.values()]
                    missing = [rank for rank in self.ranks if rank not in all_met]
                    return _unreachable(doing, self.ranks, f"{error}", missing, late)
                sleep(_AGAIN_S)
                count = store.add(here, 0)
            rank, why = json.loads(store.get(self._words))
        return refusal(doing, {rank: why})

    def close(self, why: str = "") -> None:
        """Break all connections where something is still on its way, so that nobody waits for it, and leave.

        Args:
            why: What the others are told; empty if they are told nothing.
        """
        if not self.is_closed and self._process == os.getpid():
            if why and not self._has_said:
                with suppress(RuntimeError):  # the store may be gone
                    self._store.compare_set(self._words, "", json.dumps([self.ranks[self.index], why]))
            # gloo breaks all connections when a time is over, on one that is not broken yet. To ask a rank that is not
            # connected would take the group's whole timeout, if that rank has ended.
            any(map(self._times_out, sorted(self._connected)))
            self._gloo = None

    def _times_out(self, index: int) -> bool:
        """Wait a moment for a rank, which sends nothing; return whether that is what ended it."""
        try:
            self._gloo.recv([torch.empty(1)], index, _NOTHING).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            return _TIMED_OUT in str(error)
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
    groups = _kept[world].setdefault((tuple(members), purpose), [])
    groups[:] = [group for group in groups if not group.is_closed]
    return groups


def _close_all(kept: _Kept) -> None:
    while kept:
        for group in kept.popitem()[1]:
            group.close()


def made_group(members: Sequence[int], purpose: Literal["rows", "steps"], doing: str, timeout: float) -> Group:
    """Meet the other ranks, and return a new group of all, which is kept.

    Args:
        members: The global ranks that it is of, this one among them; in the same order on each.
        purpose: What it is for.
        doing: What they are doing, for errors.
        timeout: How many seconds they wait for each other.

    Raises:
        MissingRanksError: A rank did not arrive in time, or cannot be reached.
    """
    index, name = members.index(dist.get_rank()), exchange(members, doing, None, lambda _: uuid4().hex, timeout)
    addresses = dist.PrefixStore(f"ddp_patch/group/{name}", default_store())  # type: ignore[attr-defined]  # torch documents it
    try:
        gloo = gloo_group(addresses, index, len(members), timedelta(seconds=timeout))
    except RuntimeError as error:
        raise _unreachable(doing, members, f"{error}") from error
    group = Group(gloo, name, members, index)
    kept_groups(members, purpose).append(group)
    return group


def _unreachable(
    doing: str, ranks: Sequence[int], why: str, missing: Sequence[int] = (), late: Sequence[int] = ()
) -> MissingRanksError:
    """Return the error of a connection that failed; of ranks that are missing or came late, if that is known."""
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
    """Synchronise with the other members, open a channel, and close it in the end.

    Args:
        members: The global ranks that take part, this one among them; the same on each, in order.
        doing: What they are doing, for errors.
        of: What it carries, and of which loader.
        facts: What must be the same on all.
        timeout: How many seconds they wait for each other.

    Raises:
        RankMismatchError: The facts differ, or a rank refused.
        MissingRanksError: A rank did not arrive in time.
    """
    free = [group for group in kept_groups(members, "steps") if not group.is_lent]

    def judge(records: Mapping[int, Mapping[str, Any]]) -> bool:
        """Return whether all ranks have the same group free, or none."""
        require_same(doing, {rank: {**record, "group": ""} for rank, record in records.items()})
        return len({record["group"] for record in records.values()}) == 1

    record = {"patched as": of, **facts, "group": free[0].name if free else ""}
    if not exchange(members, doing, record, judge, timeout):
        while free:  # another rank has closed it, or not given it back
            free.pop().close()
    group = free[0] if free else made_group(members, "steps", doing, timeout)
    channel, group.is_lent = Channel(doing, group, timeout), True
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
        group.is_lent = False


class Channel:
    """See ``opened``.

    Args:
        doing: What the ranks are doing, for errors.
        group: Of these ranks, which nobody else has borrowed.
        timeout: How many seconds they wait for each other.

    Attributes:
        index: This rank's number among them.
        batches_delivered: How many batches this rank has given, for errors.
        is_over: Whether a member has said that it asks for no more.
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
        """Begin to send the last row, which says that this rank asks for no more."""
        with suppress(RuntimeError):  # the group may be closed
            self._begin([0] * self._columns + [1 + self.batches_delivered], _LAST_ROW_S)

    def _begin(self, row: Sequence[float], timeout: float) -> tuple[Any, torch.Tensor]:
        own = torch.tensor(row, dtype=torch.float64, device="cpu")
        rows = own.new_empty(len(self._group.ranks), len(own))
        return self._group.gather(own, rows, timeout), rows

    def swapped(self, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Send some ranks a value each, and return the values that some send here.

        Args:
            given: The value for each rank that gets one, by its number.
            sources: Which ranks send one.
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
