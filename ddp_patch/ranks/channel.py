"""A side channel of some ranks for one pass: each sends numbers to all, and may send values to one.

It is a separate gloo group, made when the pass begins and closed when it ends. The numbers are gathered in the
background of the steps, and a rank that leaves or fails is named to the others.
"""

import atexit
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, Literal
from uuid import uuid4

import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store, gather_in_background, gloo_group
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError, message_of
from ddp_patch.ranks.exchange import already_in, exchange, ranks_text, require_same, store_reached
from ddp_patch.ranks.packing import bytes_of, from_parts, in_parts

__all__ = ["Channel", "StepSums", "gloo_between", "opened", "opened_sums"]


# A tag that nothing is sent with.
_NO_TAG = 2**30


# Keys of a loader's earlier channels in the store, by the members and the loader's number. Nobody reads them once all
# members have met for another channel: they are deleted then.
_stale: defaultdict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)

# Of channels that this rank left while others may still need what it has sent: the work, and what breaks the
# connections. To drop them would wait for the others.
_lingering: list[tuple[Any, Callable[[], None]]] = []


@atexit.register
def _cut_all() -> None:
    """Break what lingers, so that no process waits for others at its end."""
    for _, cut in _lingering:
        cut()
    _lingering.clear()


def gloo_between(name: str, index: int, count: int, timeout: float) -> Any:
    """Return a gloo group of some ranks alone, which sends from CPU to CPU, whatever the training's backend is.

    torch's ``new_group`` will not do: it needs all ranks, or names a group of some by how many groups a process is in,
    and that number may differ between the ranks.

    Args:
        name: A name that no other group has.
        index: This rank's number among the members.
        count: How many there are.
        timeout: How many seconds they wait for each other.
    """
    store = dist.PrefixStore(f"ddp_patch/gloo/{name}", default_store())  # type: ignore[attr-defined]  # in its __all__, not in its stubs
    group = gloo_group(store, index, count, timedelta(seconds=timeout))
    group.barrier().wait()  # when all have read the addresses, nobody needs them
    with suppress(RuntimeError):
        store.delete_key(f"0/{index}")  # gloo leaves every rank's address there
    return group


def _cut(group: Any, count: int, index: int) -> None:
    """Break all connections of a group."""
    for other in range(count):
        if other != index:
            # gloo breaks all connections when a time is over.
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], other, _NO_TAG).wait(timedelta(milliseconds=1))


# The first message of a value, which has it whole where that is small. Of a larger one, up to so much is in one more:
# to copy that takes less than a message for each part.
_FIRST_BYTES, _JOINED_BYTES = 4096, 2**20

# After so long, a rank that waits looks whether another has left, and says that it waits.
_SLICE_S = 1.0

# After so long, a rank that waits does what else it can.
_MOMENT_S = 0.005

# Gathering may wait some steps: the timeout runs only in ``gathered``.
_BACKGROUND = timedelta(days=1)


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

    def named(records: Mapping[int, Mapping[str, object]]) -> str:
        require_same(doing, records)
        return uuid4().hex

    name: str = exchange(members, doing, {"patched as": f"number {number}", **facts}, named, timeout)
    _lingering[:] = [(work, cut) for work, cut in _lingering if not work.is_completed()]
    channel = Channel(members, doing, name, _stale[tuple(members), number], timeout)
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
        stale: Keys of earlier channels, which are deleted; this channel's come there.
        timeout: How many seconds they wait for each other.

    Attributes:
        index: This rank's number among the members.
        batches_delivered: How many batches this rank has given, for errors.
    """

    def __init__(self, members: Sequence[int], doing: str, name: str, stale: list[str], timeout: float) -> None:
        self.index: int = members.index(dist.get_rank())
        self.batches_delivered: int = 0
        self._begun = self._gathered = 0  # how many gathers
        self._members, self._doing, self._stale, self._timeout = members, doing, stale, timeout
        self._work: Any = None
        self._rows = torch.empty(0)
        self._sends: list[tuple[int, Any]] = []
        self._store: Any = default_store()
        # Who left first, and why: that stays until its writer opens its next channel. Who waits for which gather.
        self._left = f"ddp_patch/words/{name}"
        self._waits = [f"ddp_patch/waits/{name}/{index}" for index in range(len(members))]
        with store_reached(doing):
            while stale:
                self._store.delete_key(stale.pop())
        try:
            self._group: Any = gloo_between(name, self.index, len(members), timeout)
        except RuntimeError as error:  # what gloo and stores raise
            raise self._lost(error, []) from error

    def count_batch(self) -> None:
        """Count a batch that this rank has given."""
        self.batches_delivered += 1

    def begin_gather(self, row: Sequence[float], dtype: torch.dtype = torch.int64) -> None:
        """Begin to send a row of numbers to all members, in the background; equally many on each."""
        self._begun += 1
        self._rows = torch.empty(len(self._members), len(row), dtype=dtype)
        self._work = gather_in_background(self._group, torch.tensor(row, dtype=dtype), self._rows, _BACKGROUND)

    def gathered(self, meanwhile: Callable[[], bool] = lambda: False) -> list[list[Any]]:
        """Return each member's row, as soon as all have sent theirs.

        Args:
            meanwhile: Called while this waits; returns whether to call it again in a moment.

        Raises:
            RankMismatchError: A rank has left or failed.
            MissingRanksError: A rank has ended, or sent nothing in time.
        """
        begun = looked = monotonic()
        wait_s = min(_SLICE_S, self._timeout / 4)
        while not self._has_come(_MOMENT_S if meanwhile() else wait_s):
            if (now := monotonic()) < looked + wait_s / 2:
                continue
            looked = now
            with store_reached(self._doing):
                self._store.set(self._waits[self.index], f"{self._gathered}")
                self.require_nobody_left(self._gathered)
                if now > begun + self._timeout:
                    waiting = already_in(self._store, dict(enumerate(self._waits)))
                    missing = [at for at in range(len(self._waits)) if int(waiting.get(at, -1)) != self._gathered]
                    raise self._missing(f"did not ask for the next batch within {self._timeout:g} s", missing)
        self._gathered += 1
        rows: list[list[Any]] = self._rows.tolist()
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
        header = bytes_of(torch.tensor([len(parts), *map(len, parts)]))
        if len(header) + sum(map(len, parts)) <= _FIRST_BYTES:  # one message has it all
            header, parts = torch.cat([header, *parts]), []
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        first[: len(header)] = header[:_FIRST_BYTES]
        if parts and sum(map(len, parts)) <= _JOINED_BYTES:
            parts = [torch.cat(parts)]
        messages = [first, header[_FIRST_BYTES:], *parts]
        with self._connected(target):
            self._sends += [(target, self._group.send([part], target, 0)) for part in messages if len(part)]

    def all_sent(self) -> None:
        """Wait until all that was sent has left this rank."""
        for target, work in self._sends:
            with self._connected(target):
                work.wait()
        self._sends.clear()

    def receive(self, source: int) -> Any:
        """Return the value that a member sends here."""
        header = self._received(source, _FIRST_BYTES)
        begin = 8 * (1 + int(header.view(torch.int64)[0]))
        header = torch.cat([header, self._received(source, begin - _FIRST_BYTES)])
        sizes: list[int] = header[8:begin].view(torch.int64).tolist()
        if (total := sum(sizes)) > _JOINED_BYTES:
            return from_parts([self._received(source, size) for size in sizes])
        joined = header[begin : begin + total] if begin + total <= _FIRST_BYTES else self._received(source, total)
        return from_parts([part.clone() for part in torch.split(joined, sizes)])  # each begins where any dtype may

    def _received(self, source: int, size: int) -> torch.Tensor:
        into = torch.empty(max(0, size), dtype=torch.uint8)
        if size > 0:
            with self._connected(source):
                self._group.recv([into], source, 0).wait()
        return into

    def fail(self, error: BaseException) -> None:
        """Write why this rank cannot continue, before its row tells the others."""
        self._note("failed", f"{type(error).__name__}: {message_of(error)}")

    def say_goodbye(self, row: Sequence[int]) -> None:
        """Write that this rank breaks off, and send a last row, which the others may have begun to wait for."""
        self._note("left", f"{self.batches_delivered} batches")
        with suppress(RuntimeError):  # the others may be gone
            self.begin_gather(row)

    def leave(self, error: BaseException) -> None:
        """Leave before the end, and write why: this rank asks for no more, or cannot continue."""
        if isinstance(error, GeneratorExit):
            self._note("left", f"{self.batches_delivered} batches")
        else:
            self.fail(error)
        # The others may need what this rank has sent, and who breaks off on all ranks waits for no more than that.
        with suppress(DDPPatchError):
            if self._work is not None and not self._has_come(_SLICE_S):
                _lingering.append((self._work, partial(_cut, self._group, len(self._members), self.index)))
        self.close()

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
            gather: Which gather this rank waits for. A member that left after its part in that is not to blame.
        """
        with store_reached(self._doing):
            if not self._store.check([self._left]):
                return
            index, kind, why, gathers = json.loads(self._store.get(self._left))
        if kind == "left" and gather is not None and gather < gathers:
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

    def close(self) -> None:
        """Remove this rank's end of the channel."""
        if self._sends:  # which broke off
            _cut(self._group, len(self._members), self.index)
        self._group = self._work = None
        self._sends.clear()
        with suppress(RuntimeError):  # the store may be gone
            self._store.delete_key(self._waits[self.index])

    def _closed(self) -> list[int]:
        """Return the numbers of the members whose connections are closed."""
        closed = []
        for other in range(len(self._members)):
            if other != self.index:
                try:
                    self._group.send([torch.empty(1)], other, _NO_TAG)
                except RuntimeError:  # known at once, without waiting
                    closed.append(other)
        return closed

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
        self._channel.begin_gather([value, is_step], torch.float64)
        values, are_steps = zip(*self._channel.gathered(), strict=True)
        self.go_on = any(are_steps)
        self._channel.batches_delivered += is_step
        return float(sum(values))


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
