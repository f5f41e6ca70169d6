"""Collect one record from every rank and answer each, within a deadline.

The ranks use the process group's key-value store, not a collective. So an exchange works with any backend and any
subset of ranks, leaves no group behind, and can name the missing ranks.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from ddp_patch.compat.torch_groups import default_store
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError, message_of
from ddp_patch.ranks.comparison import by_value, ranks_text
from ddp_patch.ranks.packing import packed, unpacked

__all__ = ["exchange", "refuse", "store_reached"]

V = TypeVar("V")

# The first member waits for all; the others wait this much longer for its answer.
MARGIN_S = 5.0

# The most bytes to put into one value of the store; TCPStore takes no more than 8 MiB.
_LARGEST_VALUE = 2**22

# What this process left in the store that nobody may read: keys by the number of their meeting, by its members. They
# are deleted in a later meeting, which nobody comes to before leaving the earlier ones.
_unread: dict[str, dict[int, list[str]]] = {}


def exchange(
    members: Sequence[int],
    doing: str,
    record: Any,
    judge: Callable[[Mapping[int, Any]], Mapping[int, V]],
    timeout: float,
) -> V:
    """Send this rank's record to the first member, and return that member's answer to this rank.

    Args:
        members: The global ranks that take part. Each must call this, with the same members in the same order.
        doing: What the ranks are doing, for the error.
        record: Anything that can be pickled; tensors arrive detached.
        judge: Called on the first member with every rank's record. Returns an answer for each rank; a
            ``DDPPatchError`` that it raises is raised on every rank.
        timeout: How many seconds the first member waits for the others.

    Raises:
        MissingRanksError: A rank did not arrive in time.
        RankMismatchError: A rank refused to take part.
    """
    meeting = _Meeting(members, doing, timeout)
    with store_reached(doing):
        meeting.bring(record)
        outcome, content = meeting.judged(judge) if meeting.leads else meeting.answered()
    meeting.end(outcome)
    if outcome == "raise":
        # A traceback that held the error itself would keep the caller's loader, and its workers, for long.
        try:
            raise content.with_traceback(None)
        finally:
            del content
    return content  # type: ignore[no-any-return]  # what the first member's judge returned


def refuse(members: Sequence[int], doing: str, error: Exception) -> None:
    """Tell the other members that this rank raises ``error`` instead of joining their exchange.

    They get a RankMismatchError that says so. This rank waits for nobody.
    """
    meeting = _Meeting(members, doing, timeout=0)
    refused = _Refused(f"{type(error).__name__}: {message_of(error)}")
    with suppress(MissingRanksError), store_reached(doing):  # the refusal itself says more
        meeting.bring(refused)
        if meeting.leads:
            meeting.announce(dict.fromkeys(meeting.members, ("raise", meeting.refusal({meeting.rank: refused}))))


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


class _Refused(str):
    """The record of a rank that does not take part: its error."""

    __slots__ = ()


_Answer = tuple[Literal["return", "raise"], Any]


class _Meeting:
    """The keys of one exchange."""

    def __init__(self, members: Sequence[int], doing: str, timeout: float) -> None:
        self.members, self.doing, self.timeout = list(members), doing, timeout
        self.rank = dist.get_rank()
        self.leads = self.rank == self.members[0]
        self.store = default_store()
        self.base = "ddp_patch/" + hashlib.blake2b(repr(self.members).encode(), digest_size=8).hexdigest()
        self.unread = _unread.setdefault(self.base, {})
        self.elsewhere: dict[int, str] = {}  # what other ranks do here, where it is something else

    def bring(self, record: Any) -> None:
        # Count in the store, so that a new process group starts from zero.
        self.number = self.store.add(f"{self.base}/count/{self.rank}", 1)
        self.store.set(f"{self.base}/at/{self.rank}", self.doing)
        self.unread[self.number] = [self._key("decision")] if self.leads else []
        self._put(self._key("record", self.rank), (self.doing, record))

    def judged(self, judge: Callable[[Mapping[int, Any]], Mapping[int, Any]]) -> _Answer:
        """Answer all members, on the first of them; return its own answer."""
        answers: Mapping[int, _Answer]
        try:
            records = self._records()
            if refused := {rank: record for rank, record in records.items() if isinstance(record, _Refused)}:
                raise self.refusal(refused)  # caught below, and sent to all
            answers = {rank: ("return", answer) for rank, answer in judge(records).items()}
            if self._decide("judged") != "judged":
                raise self._too_late()
        except DDPPatchError as error:
            answers = dict.fromkeys(self.members, ("raise", error))
        except Exception as error:  # noqa: BLE001 - the others wait for an answer, whatever happens here
            why = self._said_elsewhere() or f"comparing the ranks raised {error!r}."
            failure = RankMismatchError(f"{self.doing}: {why}")
            answers = dict.fromkeys(self.members, ("raise", failure))
        self.announce(answers)
        return answers[self.rank]

    def _records(self) -> dict[int, Any]:
        keys = {rank: self._key("record", rank) for rank in self.members}
        if not self._wait(list(keys.values()), self.timeout):
            raise self._missing(self.timeout)
        came = {rank: self._take(key) for rank, key in keys.items()}
        self._clear_earlier()
        self.elsewhere = {rank: doing for rank, (doing, _) in came.items() if doing != self.doing}
        return {rank: record for rank, (_, record) in came.items()}

    def announce(self, answers: Mapping[int, _Answer]) -> None:
        for rank in self.members[1:]:
            self._put(self._key("answer", rank), answers[rank])

    def answered(self) -> _Answer:
        """Wait for the first member's answer."""
        key = self._key("answer", self.rank)
        seconds = self.timeout + MARGIN_S
        # One value decides who gives up, so either all ranks get an answer or none does, however late one arrives.
        came = self._wait([key], seconds) or (self._decide("given up") == "judged" and self._wait([key], MARGIN_S))
        if not came:
            raise self._missing(seconds)
        answer: _Answer = self._take(key)
        self._clear_earlier()
        return answer

    def end(self, outcome: str) -> None:
        """Note that all that this rank left is read, if nobody refused: all but the decision."""
        if outcome == "return":
            self.unread[self.number][self.leads :] = []

    def _clear_earlier(self) -> None:
        """Delete what nobody read in earlier meetings: every member has left them."""
        for number in [number for number in self.unread if number < self.number]:
            for key in self.unread.pop(number):
                self.store.delete_key(key)

    def _decide(self, outcome: str) -> str:
        """Set the outcome of this exchange unless a member has set one already; return the outcome."""
        return self.store.compare_set(self._key("decision"), "", outcome).decode()

    def refusal(self, refused: Mapping[int, _Refused]) -> RankMismatchError:
        listed = "\n".join(f"  {ranks_text([rank])}: {why}" for rank, why in refused.items())
        return RankMismatchError(
            f"{self.doing}: not every rank could continue.\n{listed}\n"
            "Correct the error above and start all ranks again."
        )

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self.base}/{self.number}/{what}" + ("" if rank is None else f"/{rank}")

    def _put(self, key: str, value: Any) -> None:
        data = packed(value)
        slices = [data[start : start + _LARGEST_VALUE] for start in range(0, len(data), _LARGEST_VALUE)]
        for place, part in enumerate(slices):
            self.store.set(f"{key}/{place}", part)  # type: ignore[arg-type]  # bytes are taken; the stubs say str
        self.store.set(key, str(len(slices)))  # last, so that the slices are there when it is
        self.unread[self.number] += [key, *(f"{key}/{place}" for place in range(len(slices)))]

    def _take(self, key: str) -> Any:
        slices = [f"{key}/{place}" for place in range(int(self.store.get(key)))]
        value = unpacked(b"".join(self.store.get(part) for part in slices))
        for used in (*slices, key):
            self.store.delete_key(used)
        return value

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Return whether all keys arrive in time."""
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:  # the only timeout error that all stores have in common
            return self.store.check(keys)  # raises if the store is gone
        return True

    def _missing(self, seconds: float) -> MissingRanksError:
        came = [rank for rank in self.members if self._has_come(rank)]
        missing = [rank for rank in self.members if rank not in came]
        if not missing:
            return MissingRanksError(
                f"{self.doing}: all ranks arrived, but rank {self.members[0]}, which compares them, did not answer "
                f"within {seconds:g} s. It is gone or stuck: look for its error and start all ranks again."
            )
        return MissingRanksError(
            f"{self.doing}: {ranks_text(missing)} of {len(self.members)} did not arrive within {seconds:g} s; "
            f"{ranks_text(came)} did. {self._last_seen(missing)}Every rank must get here, at the same point of the "
            "script. Look for what the missing ranks do instead (an error, an if rank == 0, slow preparation), or pass "
            "a longer timeout=."
        )

    def _said_elsewhere(self) -> str:
        listed = "; ".join(f"{ranks_text(ranks)} at {doing!r}" for doing, ranks in by_value(self.elsewhere).items())
        return listed and (
            f"{listed}. Every rank must get here, at the same point of the script. Look for what these ranks do "
            "instead (an error that was caught, an if rank == 0)."
        )

    def _too_late(self) -> MissingRanksError:
        return MissingRanksError(
            f"{self.doing}: rank {self.rank} arrived or answered too late: another of the ranks {self.members} had "
            "already stopped waiting for it. Look for what delayed it, or pass a longer timeout=."
        )

    def _last_seen(self, missing: Sequence[int]) -> str:
        keys = {rank: f"{self.base}/at/{rank}" for rank in missing}
        seen = {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}
        listed = "; ".join(f"{ranks_text(ranks)} at {doing!r}" for doing, ranks in by_value(seen).items())
        return f"Last seen: {listed}. " if listed else ""

    def _has_come(self, rank: int) -> bool:
        return self.store.add(f"{self.base}/count/{rank}", 0) >= self.number
