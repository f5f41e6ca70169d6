"""A side channel of some ranks for one pass: each sends numbers to all before each step, and may send values to one.

It is a separate gloo group, made when the pass begins and closed when it ends. The numbers are gathered in the
background of the step, and a rank that leaves or fails is named to the others.
"""

import atexit
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import uuid4

import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store, gather_in_background, gloo_group
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError, message_of
from ddp_patch.ranks.exchange import exchange, from_parts, in_parts, ranks_text, require_same, store_reached

__all__ = [
    "NO_TAG",
    "Channel",
    "ExitNotes",
    "Kind",
    "StepSums",
    "cut",
    "gloo_between",
    "let_go",
    "linger",
    "opened",
    "opened_sums",
]


# A tag that nothing is sent with.
NO_TAG = 2**30


class _Lingering(NamedTuple):
    """What is left of a channel while others may still need what this rank has said."""

    group: Any
    work: Any
    members: int
    place: int


_lingering: list[_Lingering] = []


def linger(group: Any, work: Any, members: int, place: int) -> None:
    """Keep a group until its work is over. To drop it before would wait for the others."""
    _lingering.append(_Lingering(group, work, members, place))


def let_go() -> None:
    """Drop what lingers and is over."""
    _lingering[:] = [channel for channel in _lingering if not channel.work.is_completed()]


@atexit.register
def _cut_all() -> None:
    """Break what lingers, so that no process waits for others at its end."""
    for channel in _lingering:
        cut(channel.group, channel.members, channel.place)
    _lingering.clear()


def gloo_between(name: str, place: int, members: int, timeout: float) -> Any:
    """Return a gloo group of some ranks alone, which sends from CPU to CPU, whatever the training's backend is.

    torch's ``new_group`` will not do: it needs all ranks, or names a group of some by how many groups a process is in,
    and that number may differ between the ranks.

    Args:
        name: A name that no other group has.
        place: This rank's number among the members.
        members: How many there are.
        timeout: How many seconds they wait for each other.
    """
    store = dist.PrefixStore(f"ddp_patch/gloo/{name}", default_store())  # type: ignore[attr-defined]  # in its __all__, not in its stubs
    group = gloo_group(store, place, members, timedelta(seconds=timeout))
    group.barrier().wait()  # when all have read the addresses, nobody needs them
    with suppress(RuntimeError):
        store.delete_key(f"0/{place}")  # gloo leaves every rank's address there
    return group


def cut(group: Any, members: int, place: int) -> None:
    """Break all connections of a group."""
    for other in range(members):
        if other != place:
            # gloo breaks all connections when a time is over.
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], other, NO_TAG).wait(timedelta(milliseconds=1))


Kind: TypeAlias = Literal["left", "failed", "missing"]


class ExitNotes:
    """What the members of a channel write into the store: who left it first, and who waits.

    The first word stays until its writer opens its next channel; the rest goes with the channel.

    Args:
        name: The channel's name.
        members: The global ranks that take part.
        doing: What they are doing, for errors.
        stale: Keys of earlier channels, which are deleted; this channel's come there.
    """

    def __init__(self, name: str, members: Sequence[int], doing: str, stale: list[str]) -> None:
        self.name = name
        self._members, self._doing, self._stale = members, doing, stale
        self._store: Any = default_store()
        self._first, self._waits = f"ddp_patch/words/{name}", f"ddp_patch/waits/{name}"
        self._is_waiting = False
        while stale:
            self._store.delete_key(stale.pop())

    def leave(self, place: int, kind: Kind, said: str, steps: int = 0) -> None:
        """Write why this rank leaves, unless another has written already.

        Args:
            place: This rank's number among the members.
            kind: Whether it asks for no more, cannot continue, or misses others.
            said: After which batch, why, or the whole error.
            steps: In how many steps it took part.
        """
        word = json.dumps([place, kind, said, steps])
        if self._store.compare_set(self._first, "", word).decode() == word:
            self._stale.append(self._first)

    def require_none(self, step: int | None = None) -> None:
        """Raise the error of the member that left first, if one did.

        Args:
            step: The step that this rank waits for. A member that left after its part in that step is not to blame.
        """
        if not self._store.check([self._first]):
            return
        place, kind, said, steps = json.loads(self._store.get(self._first))
        if kind != "left" or step is None or step >= steps:
            raise self._error(place, kind, said)

    def _error(self, place: int, kind: Kind, said: str) -> DDPPatchError:
        who = ranks_text([self._members[place]])
        if kind == "missing":
            return MissingRanksError(said)
        if kind == "failed":
            return RankMismatchError(
                f"{self._doing}: {who} could not continue.\n  {who}: {said}\n"
                "Correct the error above and start all ranks again."
            )
        return RankMismatchError(
            f"{self._doing}: {who} left this pass after {said}, and others ask for more. The ranks communicate in "
            "each step, so every pass needs all of them. Let every rank take equally many batches: break after the "
            "same one on all, or iterate to the end."
        )

    def wait(self, place: int, step: int) -> None:
        """Write that this rank waits for a step."""
        self._store.set(f"{self._waits}/{place}", f"{step}")
        self._is_waiting = True

    def not_waiting(self, step: int) -> list[int]:
        """Return the numbers of the members that do not wait for a step."""
        keys = [f"{self._waits}/{place}" for place in range(len(self._members))]
        said = [int(self._store.get(key)) if self._store.check([key]) else -1 for key in keys]
        return [place for place, waits_for in enumerate(said) if waits_for != step]

    def tidy(self, place: int) -> None:
        """Delete what this rank wrote about waiting."""
        if self._is_waiting:
            self._store.delete_key(f"{self._waits}/{place}")


# After so long, a rank that waits looks whether another has left, and says that it waits.
_SLICE_S = 1.0

# What is gathered in the background may take long, because a step may: only who waits for it counts the seconds.
_BACKGROUND = timedelta(days=1)


@contextmanager
def opened(
    members: Sequence[int], doing: str, facts: Mapping[str, object], timeout: float, stale: list[str]
) -> Iterator["Channel"]:
    """Synchronise with the other members, open a channel, and close it in the end.

    Args:
        members: The global ranks that take part, this one among them; the same on each.
        doing: What they are doing, for errors.
        facts: What must be the same on all.
        timeout: How many seconds they wait for each other.
        stale: Keys of earlier channels in the store, which nobody reads once all have met here: they are deleted, and
            those that this channel leaves are put there.

    Raises:
        RankMismatchError: The facts differ, or a rank refused.
        MissingRanksError: A rank did not arrive in time.
    """
    name: str = exchange(members, doing, dict(facts), partial(_named, doing), timeout)
    let_go()
    with store_reached(doing):
        words = ExitNotes(name, members, doing, stale)
    channel = Channel(members, doing, words, timeout)
    try:
        yield channel
    except GeneratorExit:
        channel.leave("left", f"{channel.given} batches")
        raise
    except BaseException as error:
        channel.leave("failed", f"{type(error).__name__}: {message_of(error)}")
        raise
    else:
        channel.close()


def _named(doing: str, records: Mapping[int, Mapping[str, object]]) -> dict[int, str]:
    require_same(doing, records)
    return dict.fromkeys(records, uuid4().hex)


class Channel:
    """See ``opened``. Members are numbered from 0.

    Args:
        members: The global ranks that take part.
        doing: What they are doing, for errors.
        words: What a member leaves in the store when it goes.
        timeout: How many seconds they wait for each other.

    Attributes:
        place: This rank's number among the members.
        given: How many batches this rank has given, for errors.
    """

    def __init__(self, members: Sequence[int], doing: str, words: ExitNotes, timeout: float) -> None:
        self.place: int = members.index(dist.get_rank())
        self.given: int = 0
        self._said = self._heard = 0  # how often
        self._members, self._doing, self._words, self._timeout = members, doing, words, timeout
        self._work: Any = None
        self._rows = torch.empty(0)
        self._sends: list[tuple[int, Any]] = []
        try:
            self._group: Any = gloo_between(words.name, self.place, len(members), timeout)
        except RuntimeError as error:  # what gloo and stores raise
            raise self._lost(error, []) from error

    def say(self, row: Sequence[int]) -> None:
        """Begin to send a row of numbers to all members, in the background; equally many on each."""
        self._said += 1
        self._rows = torch.empty(len(self._members), len(row), dtype=torch.int64)
        self._work = gather_in_background(self._group, torch.tensor(row), self._rows, _BACKGROUND)

    def heard(self) -> list[list[int]]:
        """Return what each member said, as soon as all have.

        Raises:
            RankMismatchError: A rank has left or failed.
            MissingRanksError: A rank has ended, or said nothing in time.
        """
        until, wait_s = monotonic() + self._timeout, min(_SLICE_S, self._timeout / 4)
        while not self._has_come(wait_s):
            with store_reached(self._doing):
                self._words.wait(self.place, self._heard)
                self._words.require_none(self._heard)
                if monotonic() > until:
                    missing = self._words.not_waiting(self._heard)
                    raise self._missing(f"did not ask for the next batch within {self._timeout:g} s", missing)
        self._heard += 1
        rows: list[list[int]] = self._rows.tolist()
        return rows

    def _has_come(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:  # the time is over, or the connection failed
            if not self._work.is_completed():
                return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._lost(error, self._closed()) from error
        return True

    def send(self, target: int, value: Any) -> None:
        """Begin to send a value to a member, which receives it; it must not change before ``all_sent``."""
        parts = in_parts(value)
        sizes = torch.tensor([len(part) for part in parts])
        with self._connected(target):
            for tag, part in enumerate([torch.tensor([len(parts)]), sizes, *parts]):
                if len(part):
                    self._sends.append((target, self._group.send([part], target, tag)))

    def all_sent(self) -> None:
        """Wait until all that was sent has left this rank."""
        for target, work in self._sends:
            with self._connected(target):
                work.wait()
        self._sends.clear()

    def receive(self, source: int) -> Any:
        """Return the value that a member sends here."""
        (count,) = self._received(source, 0, 1, torch.int64).tolist()
        sizes: list[int] = self._received(source, 1, count, torch.int64).tolist()
        return from_parts([self._received(source, 2 + tag, size, torch.uint8) for tag, size in enumerate(sizes)])

    def _received(self, source: int, tag: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        into = torch.empty(size, dtype=dtype)
        if size:
            with self._connected(source):
                self._group.recv([into], source, tag).wait()
        return into

    def fail(self, error: BaseException) -> None:
        """Write why this rank cannot continue, before it says so."""
        with store_reached(self._doing):
            self._words.leave(self.place, "failed", f"{type(error).__name__}: {message_of(error)}")

    def require_no_failure(self) -> None:
        """Raise RankMismatchError if a member has written that it failed."""
        with store_reached(self._doing):
            self._words.require_none()

    def leave(self, kind: Kind, said: str) -> None:
        """Leave before the end, and write why."""
        with suppress(RuntimeError):  # the store may be gone
            self._words.leave(self.place, kind, said, self._said)
        # The others may need what this rank has said, and who breaks off on all ranks waits for no more than that.
        with suppress(DDPPatchError):
            if self._work is not None and not self._has_come(_SLICE_S):
                linger(self._group, self._work, len(self._members), self.place)
        self.close()

    def close(self) -> None:
        """Remove this rank's end of the channel."""
        if self._sends:  # which broke off
            cut(self._group, len(self._members), self.place)
        self._group = self._work = None
        self._sends.clear()
        with suppress(RuntimeError):  # as above
            self._words.tidy(self.place)

    def _closed(self) -> list[int]:
        """Return the numbers of the members whose connections are closed."""
        closed = []
        for other in range(len(self._members)):
            if other != self.place:
                try:
                    self._group.send([torch.empty(1)], other, NO_TAG)
                except RuntimeError:  # known at once, without waiting
                    closed.append(other)
        return closed

    @contextmanager
    def _connected(self, other: int) -> Iterator[None]:
        try:
            yield
        except DDPPatchError:
            raise
        except RuntimeError as error:  # what gloo raises
            raise self._lost(error, [other]) from error

    def _lost(self, error: RuntimeError, suspects: Sequence[int]) -> DDPPatchError:
        """Return the error of a lost connection: what a member wrote, or else who is gone."""
        with store_reached(self._doing):
            self._words.require_none()
        return self._missing(f"ended, or cannot be reached ({error})", suspects)

    def _missing(self, what: str, places: Sequence[int]) -> MissingRanksError:
        missing = [self._members[place] for place in places]
        text = (
            f"{self._doing}: {ranks_text(missing) if missing else 'another rank'} of {list(self._members)} {what}. "
            "Look for the error of that rank, or for what it does instead. If it still works, pass a longer timeout=, "
            "and name the network interface by which the ranks reach each other in GLOO_SOCKET_IFNAME."
        )
        with suppress(RuntimeError):  # the store may be gone
            self._words.leave(self.place, "missing", text)
        return MissingRanksError(text)


class _Sum(NamedTuple):
    value: float
    is_over: bool  # whether no rank has a step any more


class StepSums:
    """Sums over the ranks, one a step. Ranks may make different numbers of steps."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def of(self, value: float) -> float:
        """Return the sum of all ranks' values of this step.

        Raises:
            RankMismatchError: A rank broke off or failed.
            MissingRanksError: A rank did not come to this step in time.
        """
        return self._next(value, has_step=True).value

    def finish(self) -> None:
        """Take part in the other ranks' steps until no rank has one."""
        while not self._next(0.0, has_step=False).is_over:
            pass

    def _next(self, value: float, *, has_step: bool) -> _Sum:
        (bits,) = struct.unpack("q", struct.pack("d", value))
        self._channel.say([bits, has_step])
        said = self._channel.heard()
        values = struct.unpack(f"{len(said)}d", struct.pack(f"{len(said)}q", *(row[0] for row in said)))
        self._channel.given += has_step
        return _Sum(sum(values), not any(row[1] for row in said))


@contextmanager
def opened_sums(
    members: Sequence[int], doing: str, facts: Mapping[str, object], timeout: float, stale: list[str]
) -> Iterator[StepSums]:
    """Meet the other ranks, and connect with them for a pass; see ``opened``."""
    with opened(members, doing, facts, timeout, stale) as channel:
        sums = StepSums(channel)
        yield sums
        sums.finish()
