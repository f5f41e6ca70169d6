"""Collect one record from every rank and answer each, within a deadline.

The ranks use the process group's key-value store, not a collective. So an exchange works with any backend and any
subset of ranks, leaves no group behind, and can name the missing ranks.
"""

import hashlib
import json
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist

from ddp_patch import errors
from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError, message_of

__all__ = [
    "FEW",
    "PerRank",
    "already_in",
    "by_value",
    "digest",
    "exchange",
    "mismatch",
    "parties_text",
    "ranks_text",
    "refuse",
    "require_same",
    "store_reached",
    "who_has_what",
]


# Of more ranks, or of more values, an error lists no more than these.
FEW = 16


def ranks_text(numbers: Sequence[int]) -> str:
    """Return which ranks these are, in words.

    >>> ranks_text([1]), ranks_text([0, 2]), ranks_text([*range(512), *range(513, 1024)])
    ('rank 1', 'ranks 0, 2', 'ranks 0 to 511, 513 to 1023')
    """
    places = enumerate(sorted(numbers))
    runs = [[rank for _, rank in run] for _, run in groupby(places, lambda place: place[1] - place[0])]
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    others = sum(map(len, runs[FEW:]))
    listed = ", ".join(parts[:FEW]) + (f" and {others} others" if others else "")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {listed}"


def by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value."""
    holders: dict[Any, list[int]] = defaultdict(list)
    for rank, value in values.items():
        holders[value].append(rank)
    return holders


def _by_size(holders: Mapping[Any, list[int]]) -> list[tuple[Any, list[int]]]:
    """Return the parties, the smallest first."""
    return sorted(holders.items(), key=lambda party: (len(party[1]), min(party[1])))


def who_has_what(holders: Mapping[Any, list[int]]) -> str:
    """Return who has what, in words; of many ranks, the last are the others."""
    parties, ranks = _by_size(holders), sum(map(len, holders.values()))
    few = len(parties) if ranks <= FEW else min(len(parties), FEW) - 1
    told = [f"{value} on {ranks_text(members)}" for value, members in parties[:few]]
    if others := parties[few:]:
        value = others[0][0] if len(others) == 1 else f"{len(others)} other values"
        told.append(f"{value} on the other {sum(len(members) for _, members in others)}")
    return "; ".join(told)


def parties_text(holders: Mapping[Any, list[int]]) -> str:
    """Return whose values differ, in words."""
    parties = [*holders.values()]
    others = sum(map(len, parties[FEW:]))
    return " and ".join([*map(ranks_text, parties[:FEW]), *([f"{others} others"] if others else [])])


def mismatch(text: str, *parties: Mapping[Any, list[int]]) -> RankMismatchError:
    """Return an error which, of many ranks, one of each party tells.

    Args:
        text: Its text.
        parties: The ranks that have each value, of each thing in which they differ.
    """
    error = RankMismatchError(text)
    error.told_on = sorted({min(members) for holders in parties for _, members in _by_size(holders)[:FEW]})[:FEW]
    return error


def require_same(doing: str, records: Mapping[int, Mapping[str, object]]) -> None:
    """Raise RankMismatchError, with a table of who has what, unless every rank's facts are the same."""
    names = dict.fromkeys(name for record in records.values() for name in record)
    told = {name: {rank: str(record.get(name, "nothing")) for rank, record in records.items()} for name in names}
    if differing := {name: holders for name in names if len(holders := by_value(told[name])) > 1}:
        rows = "\n".join(f"  {name}: {who_has_what(holders)}" for name, holders in differing.items())
        raise mismatch(
            f"{doing}: the ranks differ, so their shards would overlap or their steps would not be equal.\n{rows}\n"
            "Make these the same on every rank, and call and iterate the same loaders on each.",
            *differing.values(),
        )


def digest(value: object) -> str:
    """Return a short name for a value, the same on every rank."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def already_in(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """Return what a store has under some keys now: asked for what is missing, it would wait."""
    return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}


# The first member waits for all; the others wait this much longer for its answer.
MARGIN_S = 5.0

# Counts the forms that records have had. Ranks whose packages differ in it, or in the version, say so and stop.
PROTOCOL = 1

# The most bytes to put into one value of the store; TCPStore takes no more than 8 MiB.
_LARGEST_VALUE = 2**22
_MOST_SLICES = 2**16


@dataclass(slots=True)
class _Past:
    """A rank's earlier meetings with the same members.

    Attributes:
        unread: The keys of what it has left in the store, and a later meeting deletes. Nobody comes to a meeting before
            leaving the earlier ones.
        doing: What they did when they last met.
    """

    unread: list[str] = field(default_factory=list)
    doing: str = ""


_pasts: dict[tuple[str, int], _Past] = {}


class PerRank(dict[int, Any]):
    """The answers of a judge that tells each rank something else."""


Judge: TypeAlias = Callable[[Mapping[int, Any]], Any]


def exchange(members: Sequence[int], doing: str, record: Any, judge: Judge, timeout: float) -> Any:
    """Send this rank's record to the first member, and return that member's answer.

    Records and answers are data, and nothing that comes is run: ``bytes`` come as they are, all else as JSON has it. So
    a tuple comes as a list, and what JSON does not know as its text.

    Args:
        members: The global ranks that take part. Each must call this, with the same members in the same order.
        doing: What the ranks are doing, for the error.
        record: What the judge gets of this rank.
        judge: Called on the first member with every rank's record. Returns one answer for all, or ``PerRank``; a
            ``DDPPatchError`` that it raises is raised on every rank.
        timeout: How many seconds the first member waits for the others.

    Raises:
        MissingRanksError: A rank did not arrive in time.
        RankMismatchError: A rank refused to take part, has another version, or what came is no record.
    """
    meeting = _Meeting(members, doing, timeout)
    with store_reached(doing):
        meeting.bring(record)
        failures, answer = meeting.judged(judge) if meeting.leads else meeting.answered()
    if failures:
        # A traceback that held the error itself would keep the caller's loader, and its workers, for long.
        raise failures.pop().with_traceback(None)
    return answer


def refuse(members: Sequence[int], doing: str, error: Exception) -> None:
    """Tell the other members that this rank raises ``error`` instead of joining their exchange.

    They get a RankMismatchError that says so. This rank waits for nobody.
    """
    meeting = _Meeting(members, doing, timeout=0)
    why = f"{type(error).__name__}: {message_of(error)}"
    with suppress(MissingRanksError), store_reached(doing):  # the refusal itself says more
        meeting.bring(None, why)
        if meeting.leads:
            meeting.announce(meeting.refusal({meeting.rank: why}))


@contextmanager
def store_reached(doing: str) -> Iterator[None]:
    """Raise MissingRanksError if the store is gone; ``doing`` says what the ranks do, for the error."""
    try:
        yield
    except DDPPatchError:
        raise
    except RuntimeError as error:  # from the store's operations; all others are caught where they are raised
        raise MissingRanksError(
            f"{doing}: the process group's store cannot be reached ({error}). The process that holds it, mostly rank "
            "0's, has ended. Look for its error and start all ranks again."
        ) from error


@contextmanager
def _read_from(key: str) -> Iterator[None]:
    """Raise RankMismatchError, which names the key, if what lies there is not what this version writes."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise RankMismatchError(
            f"What lies under {key!r} in the process group's store is no record of a rank ({type(error).__name__}). "
            "Look for another program that uses the same store, give each its own port, and start all ranks again."
        ) from None


def _version() -> str:
    return f"{import_module('ddp_patch').__version__} (protocol {PROTOCOL})"


class _Message(NamedTuple):
    """A record or an answer: a line of JSON with all but the content, then the content; slices are under other keys.

    Attributes:
        version: Of what wrote it; if another than ours, nothing else of it is read.
        doing: What the ranks are doing.
        refusal: Why the rank does not take part; empty if it does.
        error: The error to raise: the name of its class, its text, and ``RankMismatchError.told_on``.
        is_per_rank: Whether each rank has an answer of its own, under another key.
        is_json: Whether the content is JSON.
        slices: How many slices of a large content there are.
        content: The content, as bytes.
    """

    version: str
    doing: str = ""
    refusal: str = ""
    error: tuple[str, str, Sequence[int]] | None = None
    is_per_rank: bool = False
    is_json: bool = True
    slices: int = 0
    content: bytes = b""

    @classmethod
    def of(cls, content: Any, **said: Any) -> "_Message":
        """Return the message with a content."""
        is_json = not isinstance(content, bytes)
        data = json.dumps(content, default=str).encode() if is_json else content
        return cls(_version(), **said, is_json=is_json, content=data)

    def written(self, key: str) -> dict[str, bytes]:
        """Return what to put under which keys; the last says that the others are there."""
        starts = range(0, len(self.content) or 1, _LARGEST_VALUE)
        first, *slices = [self.content[at : at + _LARGEST_VALUE] for at in starts]
        said = {name: value for name, value in self._asdict().items() if name != "content"}
        line = json.dumps({**said, "slices": len(slices)}).encode()
        return {f"{key}/{at}": data for at, data in enumerate(slices)} | {key: line + b"\n" + first}

    @classmethod
    def read(cls, key: str, data: bytes) -> "_Message":
        """Return the message that lies under a key, without what is in slices."""
        line, _, content = data.partition(b"\n")
        with _read_from(key):
            said = json.loads(line)
            if said["version"] != _version():
                return cls(str(said["version"]))
            message = cls(**said, content=content)
            types = [*map(type, (message.doing, message.refusal, message.slices))]
            if types != [str, str, int] or message.slices not in range(_MOST_SLICES):
                raise TypeError
            return message

    def taken(self, key: str) -> Any:
        """Return the content."""
        with _read_from(key):
            return json.loads(self.content) if self.is_json else self.content


class _Meeting:
    """The keys of one exchange.

    It takes as many requests of a rank whatever the number of ranks.
    """

    def __init__(self, members: Sequence[int], doing: str, timeout: float) -> None:
        self.members, self.doing, self.timeout = list(members), doing, timeout
        self.rank = dist.get_rank()
        self.leads = self.rank == self.members[0]
        self.store: Any = default_store()
        self.base = f"ddp_patch/{digest(self.members)}"

    def bring(self, record: Any, refusal: str = "") -> None:
        # Count in the store, so that a new process group starts from zero.
        self.number = self.store.add(f"{self.base}/count/{self.rank}", 1)
        if self.number == 1:
            _pasts.pop((self.base, self.rank), None)
        self.past = _pasts.setdefault((self.base, self.rank), _Past())
        self.own = _Message.of(record, doing=self.doing, refusal=refusal)
        if not self.leads:  # who reads its own record from here
            self._leave(self.own, "record", self.rank)

    def judged(self, judge: Judge) -> tuple[list[DDPPatchError], Any]:
        """Answer all members, on the first of them; return the error to raise, if any, and its own answer."""
        elsewhere: dict[int, str] = {}  # what other ranks do here, where it is something else
        try:
            came = self._records()
            if refused := {rank: message.refusal for rank, message in came.items() if message.refusal}:
                raise self.refusal(refused)  # caught below, and sent to all
            records = {rank: message.taken(self._key("record", rank)) for rank, message in came.items()}
            elsewhere = {rank: message.doing for rank, message in came.items() if message.doing != self.doing}
            answer = judge(records)
            each = answer.items() if isinstance(answer, PerRank) else ()
            messages = {rank: _Message.of(own) for rank, own in each}
            for_all = _Message.of(None if messages else answer, is_per_rank=bool(messages))
            if self._decide("judged") != "judged":
                raise MissingRanksError(
                    f"{self.doing}: rank {self.rank} arrived or answered too late: another of "
                    f"{ranks_text(self.members)} had already stopped waiting for it. Look for what delayed it, or pass "
                    "a longer timeout=."
                )
        except Exception as error:  # noqa: BLE001 - the others wait for an answer, whatever happens here
            failure = self._told(error, elsewhere)
        else:
            own = messages.pop(self.rank, for_all)
            # Each of the others deletes its own.
            self._put(ChainMap(*(one.written(self._key("answer", rank)) for rank, one in messages.items())))
            self._leave(for_all, "answer")
            return [], own.taken(self._key("answer"))
        self.announce(failure)
        return [failure], None

    def _told(self, error: Exception, elsewhere: Mapping[int, str]) -> DDPPatchError:
        """Return the error to raise; what ranks do elsewhere says more than how their records differ."""
        if isinstance(error, DDPPatchError) and not (elsewhere and isinstance(error, RankMismatchError)):
            return error
        if not elsewhere:
            return RankMismatchError(f"{self.doing}: comparing the ranks raised {error!r}.")
        where = "; ".join(f"{ranks_text(ranks)} at {what!r}" for what, ranks in by_value(elsewhere).items())
        return RankMismatchError(
            f"{self.doing}: {where}. Every rank must get here, at the same point of the script. Look for what these "
            "ranks do instead (an error that was caught, an if rank == 0)."
        )

    def announce(self, failure: DDPPatchError) -> None:
        """Let all others raise an error: of its own kind, as far as that is one of ours."""
        kind = next(kind for kind in type(failure).__mro__ if kind.__module__ == errors.__name__)
        error = (kind.__name__, message_of(failure), getattr(failure, "told_on", ()))
        self._leave(_Message.of(None, error=error), "answer")

    def answered(self) -> tuple[list[DDPPatchError], Any]:
        """Wait for the first member's answer; return the error to raise, if any, and the answer."""
        key, seconds = self._key("answer"), self.timeout + MARGIN_S
        # One value decides who gives up, so either all ranks get an answer or none does, however late one arrives.
        came = self._wait([key], seconds) or (self._decide("given up") == "judged" and self._wait([key], MARGIN_S))
        if not came:
            raise self._unanswered(seconds)
        (message,) = self._read([key])
        self._require_one_version({self.members[0]: message, self.rank: self.own})
        if message.is_per_rank:
            (message,) = self._read([key := self._key("answer", self.rank)])
            self.past.unread += message.written(key)
        self._clear()
        with _read_from(key):
            return [self._failure(*message.error)] if message.error else [], message.taken(key)

    def _failure(self, name: str, text: str, told_on: Sequence[int]) -> DDPPatchError:
        """Return the error that the answer is; of many ranks, only some tell all of it."""
        kind: type[DDPPatchError] = getattr(errors, name)
        if DDPPatchError not in kind.__mro__:
            raise TypeError
        if len(self.members) > FEW and told_on and self.rank not in told_on:
            text = f"{self.doing}: the ranks differ. Look at the error of {ranks_text(told_on)}, which says in what."
        return kind(text)

    def _records(self) -> dict[int, _Message]:
        """Return every rank's record, on the first rank."""
        came, others = {self.rank: self.own}, self.members[1:]
        if keys := [self._key("record", rank) for rank in others]:
            if not self._wait(keys, self.timeout) and (missing := self._without_record(others)):
                here = ranks_text([rank for rank in self.members if rank not in set(missing)])
                raise self._not_here(missing, self.timeout, f"{here} did. ")
            came.update(zip(others, self._read(keys), strict=True))
        self._clear()
        self._require_one_version(came)
        return came

    def _require_one_version(self, came: Mapping[int, _Message]) -> None:
        """Raise RankMismatchError unless all was written by the same version; note that the ranks have met."""
        versions = by_value({rank: message.version for rank, message in came.items()})
        if len(versions) > 1:
            raise mismatch(
                f"{self.doing}: the ranks run different versions of ddp_patch: {who_has_what(versions)}. Make the "
                "version the same on every rank, and start all again.",
                versions,
            )
        self.past.doing = self.doing

    def _clear(self) -> None:
        """Delete what this rank left: every member has read it, or never will."""
        while self.past.unread:
            self.store.delete_key(self.past.unread.pop())

    def _leave(self, message: _Message, what: str, rank: int | None = None) -> None:
        """Put a message into the store, and note that this rank is to delete it."""
        written = message.written(self._key(what, rank))
        self.past.unread += written
        self._put(written)

    def _decide(self, outcome: str) -> str:
        """Set the outcome of this exchange unless a member has set one already; return the outcome."""
        key = self._key("decision")
        if self.leads:
            self.past.unread.append(key)
        return str(self.store.compare_set(key, "", outcome).decode())

    def refusal(self, refused: Mapping[int, str]) -> RankMismatchError:
        listed = "\n".join(f"  {ranks_text(ranks)}: {why}" for why, ranks in by_value(refused).items())
        return RankMismatchError(
            f"{self.doing}: not every rank could continue.\n{listed}\n"
            "Correct the error above and start all ranks again."
        )

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self.base}/{self.number}/{what}" + ("" if rank is None else f"/{rank}")

    def _put(self, written: Mapping[str, bytes]) -> None:
        """Put this under its keys, as much in one request as a value may have."""
        ends = zip(written.items(), accumulate(map(len, written.values())), strict=True)
        for _, batch in groupby(ends, lambda end: end[1] // _LARGEST_VALUE):
            self.store.multi_set(*zip(*(item for item, _ in batch), strict=True))

    def _read(self, keys: Sequence[str]) -> list[_Message]:
        """Return what lies under keys that are there; a second time only what is in slices."""
        messages = list(map(_Message.read, keys, self.store.multi_get(keys)))
        parts = [f"{key}/{at}" for key, message in zip(keys, messages, strict=True) for at in range(message.slices)]
        if not parts:
            return messages
        with _read_from(parts[0]):
            if not self.store.check(parts):
                raise KeyError
        came = iter(self.store.multi_get(parts))
        return [each._replace(content=each.content + b"".join(islice(came, each.slices))) for each in messages]

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Return whether all keys arrive in time."""
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:  # the only timeout error that all stores have in common
            return bool(self.store.check(keys))  # raises if the store is gone
        return True

    def _without_record(self, ranks: Sequence[int]) -> list[int]:
        """Return which of some ranks have none: few requests where few are missing."""
        if not ranks or self.store.check([self._key("record", rank) for rank in ranks]):
            return []
        middle = len(ranks) // 2
        return [*self._without_record(ranks[:middle]), *self._without_record(ranks[middle:])] if middle else [*ranks]

    def _unanswered(self, seconds: float) -> MissingRanksError:
        """Return the error of a rank to which the first one did not answer."""
        first = self.members[0]
        if self.store.add(f"{self.base}/count/{first}", 0) < self.number:
            return self._not_here([first], seconds, f"it compares the ranks, and {ranks_text([self.rank])} waits. ")
        return MissingRanksError(
            f"{self.doing}: rank {first}, which compares the ranks, arrived but did not answer within {seconds:g} s. "
            "It is gone or stuck, or came late and waits for others: look for its error and start all ranks again."
        )

    def _not_here(self, missing: Sequence[int], seconds: float, came: str) -> MissingRanksError:
        seen = f"Last seen: {ranks_text(missing)} at {self.past.doing!r}. " if self.past.doing else ""
        return MissingRanksError(
            f"{self.doing}: {ranks_text(missing)} of {len(self.members)} did not arrive within {seconds:g} s; "
            f"{came}{seen}Every rank must get here, at the same point of the script. Look for what the missing ranks "
            "do instead (an error, an if rank == 0, slow preparation), or pass a longer timeout=."
        )
