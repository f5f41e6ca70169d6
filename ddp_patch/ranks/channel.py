"""A side channel of some ranks for one pass: each sends numbers to all, and may send values to one.

It borrows the ranks' group (``ranks/group``) for the pass. The numbers are gathered in the background of the steps, and
a rank that leaves or fails is named to the others.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError, message_of
from ddp_patch.ranks.exchange import already_in, exchange, ranks_text, require_same, store_reached
from ddp_patch.ranks.group import Group, kept_groups, made_group
from ddp_patch.ranks.packing import bytes_of, from_parts, in_parts

__all__ = ["Channel", "StepSums", "opened", "opened_sums"]


# Keys of a loader's earlier channels in the store, by the members and the loader's number. Nobody reads them once all
# members have met for another channel: they are deleted then.
_stale: defaultdict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)

# After so long, a rank that waits looks whether another has left, and says that it waits.
_SLICE_S = 1.0

# After so long, a rank that waits does what else it can.
_MOMENT_S = 0.005


@contextmanager
def opened(
    members: Sequence[int], doing: str, number: int, facts: Mapping[str, object], timeout: float
) -> Iterator["Channel"]:
    """Synchronise with the other members, open a channel, and close it in the end.

    Args:
        members: The global ranks that take part, this one among them; the same on each.
        doing: What they are doing, for errors.
        number: The number by which they know the loader.
        facts: What must be the same on all.
        timeout: How many seconds they wait for each other.

    Raises:
        RankMismatchError: The facts differ, or a rank refused.
        MissingRanksError: A rank did not arrive in time.
    """
    free = {group.name: group for group in kept_groups(members) if not group.is_lent}
    own = {"groups": {name: group.begun for name, group in free.items()}}

    def chosen(records: Mapping[int, Mapping[str, Any]]) -> tuple[str, str | None]:
        require_same(doing, {rank: {**record, "groups": ""} for rank, record in records.items()})
        first, *others = (record["groups"] for record in records.values())
        alike = (name for name, begun in first.items() if all(other.get(name) == begun for other in others))
        return uuid4().hex, next(alike, None)

    record = {"patched as": f"number {number}", **facts, **own}
    name, kept = exchange(members, doing, record, chosen, timeout)
    if kept is None:  # in those that are free, a rank has begun what others have not
        for group in free.values():
            group.close()
            kept_groups(members).remove(group)
    group = free[kept] if kept is not None else made_group(members, doing, timeout)
    channel = Channel(members, doing, name, group, _stale[tuple(members), number], timeout)
    try:
        yield channel
    except BaseException as error:
        channel.leave(error)
        raise
    else:
        channel.close()


class Channel:
    """See ``opened``. Members are numbered from 0.

    Args:
        members: The global ranks that take part.
        doing: What they are doing, for errors.
        name: A name that no other channel has.
        group: Of these ranks, which nobody else has borrowed.
        stale: Keys of earlier channels, which are deleted; this channel's come there.
        timeout: How many seconds they wait for each other.

    Attributes:
        index: This rank's number among the members.
        batches_delivered: How many batches this rank has given, for errors.
    """

    def __init__(
        self, members: Sequence[int], doing: str, name: str, group: Group, stale: list[str], timeout: float
    ) -> None:
        self.index: int = members.index(dist.get_rank())
        self.batches_delivered: int = 0
        self._begun = 0  # how many gathers and sums
        self._members, self._doing, self._group = members, doing, group
        self._stale, self._timeout = stale, timeout
        self._in_group = [group.ranks.index(member) for member in members]
        self._sends: list[tuple[int, Any]] = []
        self._store: Any = default_store()
        # Who left first, and why: that stays until its writer opens its next channel. Who waits for which gather.
        self._left = f"ddp_patch/words/{name}"
        self._waits = [f"ddp_patch/waits/{name}/{index}" for index in range(len(members))]
        group.is_lent = True
        with store_reached(doing):
            while stale:
                self._store.delete_key(stale.pop())

    def gathered(self, row: Sequence[int], meanwhile: Callable[[], bool]) -> list[list[int]]:
        """Send a row of numbers, equally many on each member, and return all members' rows; see ``_wait``."""
        values = torch.empty(len(self._members), len(row), dtype=torch.int64)
        self._wait(self._group.gather(torch.tensor(row, dtype=torch.int64), values), meanwhile)
        rows: list[list[int]] = values[self._in_group].tolist()
        return rows

    def summed(self, values: Sequence[float]) -> list[float]:
        """Return the sums of all members' values; see ``_wait``."""
        totals = torch.tensor(values, dtype=torch.float64)
        self._wait(self._group.sum(totals), lambda: False)
        sums: list[float] = totals.tolist()
        return sums

    def _wait(self, work: Any, meanwhile: Callable[[], bool]) -> None:
        """Wait until all members have sent what was begun.

        Args:
            work: What was begun.
            meanwhile: Called while this waits; returns whether to call it again in a moment.

        Raises:
            RankMismatchError: A rank has left or failed.
            MissingRanksError: A rank has ended, or sent nothing in time.
        """
        self._begun += 1
        begun = looked = monotonic()
        wait_s = min(_SLICE_S, self._timeout / 4)
        while not self._has_come(work, _MOMENT_S if meanwhile() else wait_s):
            if (now := monotonic()) < looked + wait_s / 2:
                continue
            looked = now
            with store_reached(self._doing):
                self._store.set(self._waits[self.index], f"{self._begun}")
                self.require_nobody_left(self._begun)
                if now > begun + self._timeout:
                    waiting = already_in(self._store, dict(enumerate(self._waits)))
                    missing = [at for at in range(len(self._waits)) if int(waiting.get(at, 0)) != self._begun]
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
        parts = in_parts(value)
        sizes = bytes_of(torch.tensor([*map(len, parts)]))
        body = torch.cat([sizes, *parts])  # to copy that takes less than a message for each part
        with self._connected(target):
            for message in (bytes_of(torch.tensor([len(parts), len(body)])), body):
                self._sends.append((target, self._group.send(message, self._in_group[target])))

    def all_sent(self) -> None:
        """Wait until all that was sent has left this rank."""
        for target, work in self._sends:
            with self._connected(target):
                work.wait()
        self._sends.clear()

    def receive(self, source: int) -> Any:
        """Return the value that a member sends here."""
        count, size = self._received(source, 16).view(torch.int64).tolist()
        body = self._received(source, size)
        sizes: list[int] = body[: 8 * count].view(torch.int64).tolist()
        # Each part is copied to where any dtype may begin.
        return from_parts([part.clone() for part in torch.split(body[8 * count :], sizes)])

    def _received(self, source: int, size: int) -> torch.Tensor:
        into = torch.empty(size, dtype=torch.uint8)
        with self._connected(source):
            self._group.receive(into, self._in_group[source])
        return into

    def fail(self, error: BaseException) -> None:
        """Write why this rank cannot continue, before its row tells the others."""
        self._note("failed", f"{type(error).__name__}: {message_of(error)}")

    def leave(self, error: BaseException) -> None:
        """Leave before the end, and write why: this rank asks for no more, or cannot continue."""
        if isinstance(error, GeneratorExit):
            self._note("left", f"{self.batches_delivered} batches")
        else:
            self.fail(error)
        self.close(is_whole=isinstance(error, GeneratorExit) and not self._sends)

    def _note(self, kind: Literal["left", "failed", "missing"], why: str) -> None:
        """Write why this rank leaves, unless another has written already, or the store is gone.

        Args:
            kind: Whether it asks for no more, cannot continue, or misses others.
            why: After which batch, why, or the whole error.
        """
        note = json.dumps([self.index, kind, why, self._begun])
        with suppress(RuntimeError):
            if self._store.compare_set(self._left, "", note).decode() == note:
                self._stale.append(self._left)

    def require_nobody_left(self, gather: int | None = None) -> None:
        """Raise the error of the member that left first, if one did.

        Args:
            gather: Which gather or sum this rank waits for, from 1. A member that left after it is not to blame.
        """
        with store_reached(self._doing):
            if not self._store.check([self._left]):
                return
            index, kind, why, gathers = json.loads(self._store.get(self._left))
        if kind == "left" and gather is not None and gather <= gathers:
            return
        who = ranks_text([self._members[index]])
        if kind == "missing":
            raise MissingRanksError(why)
        if kind == "failed":
            raise RankMismatchError(
                f"{self._doing}: {who} could not continue.\n  {who}: {why}\n"
                "Correct the error above and start all ranks again."
            )
        raise RankMismatchError(
            f"{self._doing}: {who} left this pass after {why}, and others ask for more. The ranks communicate "
            "during a pass, so it needs all of them. Let every rank take equally many batches: break after the same "
            "one on all, or iterate to the end."
        )

    def close(self, *, is_whole: bool = True) -> None:
        """Give the group back; where something may still be on its way, break its connections."""
        self._group.is_lent = False
        if not is_whole:
            self._group.close()
            with suppress(ValueError):  # the process group, or another pass, may have ended it
                kept_groups(self._members).remove(self._group)
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
        self._note("missing", text)
        return MissingRanksError(text)


class StepSums:
    """Sums over the ranks, one a step. Ranks may make different numbers of steps.

    Attributes:
        go_on: Whether a rank may have another step.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.go_on: bool = True

    def sum_over_ranks(self, value: float, *, is_step: bool = True) -> float:
        """Return the sum of all ranks' values of this step.

        Args:
            value: This rank's.
            is_step: Whether this rank has a step, or takes part in the others'.

        Raises:
            RankMismatchError: A rank broke off or failed.
            MissingRanksError: A rank did not come to this step in time.
        """
        total, steps = self._channel.summed([value, is_step])
        self.go_on = steps > 0
        self._channel.batches_delivered += is_step
        return total


@contextmanager
def opened_sums(
    members: Sequence[int], doing: str, number: int, facts: Mapping[str, object], timeout: float
) -> Iterator[StepSums]:
    """Meet the other ranks, and connect with them for a pass; see ``opened``."""
    with opened(members, doing, number, facts, timeout) as channel:
        sums = StepSums(channel)
        yield sums
        while sums.go_on:
            sums.sum_over_ranks(0.0, is_step=False)
