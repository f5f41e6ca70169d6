"""Collect one record from every rank and answer each, within a deadline.

The ranks use the process group's key-value store, not a collective. So an exchange works with any backend and any
subset of ranks, leaves no group behind, and can name the missing ranks.
"""

import hashlib
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchError, LeaderError, MissingRanksError, RankMismatchError, message_of

__all__ = [
    "FIRST_PIECE",
    "LARGEST_PIECE",
    "Leader",
    "already_in",
    "by_value",
    "bytes_of",
    "digest",
    "exchange",
    "from_parts",
    "in_parts",
    "packed",
    "ranks_text",
    "refuse",
    "require_same",
    "store_reached",
    "unpacked",
]


T = TypeVar("T")

# The most items in a message, all ranks' together. An ordinary epoch is one message. A stream of unknown length starts
# with the smaller number, because it may be slow or endless.
LARGEST_PIECE, FIRST_PIECE = 2**20, 2**12

# Each member's items, the note sent with them, and whether they are the last.
_Piece: TypeAlias = tuple[list[list[Any]], Any, bool]

_SENDING = "Sending every rank its share"


V = TypeVar("V")


def ranks_text(numbers: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value."""
    holders: dict[Any, list[int]] = defaultdict(list)
    for rank, value in values.items():
        holders[value].append(rank)
    return holders


def require_same(doing: str, records: Mapping[int, Mapping[str, object]]) -> None:
    """Raise RankMismatchError, with a table of who has what, unless every rank's facts are the same."""
    rows = []
    for name in dict.fromkeys(name for record in records.values() for name in record):
        holders = by_value({rank: str(record.get(name, "nothing")) for rank, record in records.items()})
        if len(holders) > 1:
            rows.append(
                f"  {name}: " + "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in holders.items())
            )
    if rows:
        raise RankMismatchError(
            f"{doing}: the ranks differ, so their shards would overlap or their steps would not be equal.\n"
            + "\n".join(rows)
            + "\nMake these the same on every rank, and call and iterate the same loaders on each."
        )


def packed(value: Any, beside: Callable[[pickle.PickleBuffer], object] | None = None) -> bytes:
    """Pickle a value; tensors arrive detached, and those of other devices than the CPU travel through it.

    Args:
        value: Anything that can be pickled.
        beside: Called with the memory of each tensor and array, which then stays out of the pickle.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=beside).dump(value)
    return file.getvalue()


def unpacked(data: Any, beside: Sequence[torch.Tensor] = ()) -> Any:
    """Return a pickled value.

    Args:
        data: What ``packed`` returned.
        beside: The memory that stayed out of the pickle, in order. The value then lives in it.
    """
    return pickle.loads(data, buffers=[part.numpy() for part in beside])  # noqa: S301 - our own ranks'


def in_parts(value: Any) -> list[torch.Tensor]:
    """Return a value as bytes to send: its pickle, then the memory of each tensor and array, uncopied if possible."""
    parts: list[torch.Tensor] = []
    data = packed(value, lambda memory: parts.append(_as_tensor(memory.raw())))
    return [_as_tensor(memoryview(bytearray(data))), *parts]


def from_parts(parts: Sequence[torch.Tensor]) -> Any:
    """Return the value of which ``in_parts`` made these."""
    data, *beside = parts
    return unpacked(data.numpy().data, beside)


def _as_tensor(memory: memoryview) -> torch.Tensor:
    """Return the same memory as a tensor; a copy where it may not be written to."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values: the same memory where it lies there in order, on the CPU."""
    plain: torch.Tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    dense = plain.contiguous()  # whose dimensions of one element may have any stride
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Pickles the values of tensors alone; torch would pickle all of the storage that a view is a part of."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a tensor again, or NotImplemented for the usual way."""
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized
        if not is_plain or value.is_meta:
            return NotImplemented
        data = bytes_of(value).numpy() if value.numel() else np.empty(0, np.uint8)
        return _tensor, (data, value.dtype, tuple(value.shape), value.device.type)


def _tensor(data: Any, dtype: torch.dtype, shape: Sequence[int], device: str) -> torch.Tensor:
    """Make a tensor of these bytes again."""
    return torch.from_numpy(data).view(dtype).reshape(shape).to(device)


def digest(value: object) -> str:
    """Return a short name for a value, the same on every rank."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def already_in(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """Return what a store has under some keys now: asked for what is missing, it would wait."""
    return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}


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
        is_raised, content = meeting.judged(judge) if meeting.leads else meeting.answered()
    if not is_raised:
        meeting.end()
        return content  # type: ignore[no-any-return]  # what the first member's judge returned
    # A traceback that held the error itself would keep the caller's loader, and its workers, for long.
    try:
        raise content.with_traceback(None)
    finally:
        del content


def refuse(members: Sequence[int], doing: str, error: Exception) -> None:
    """Tell the other members that this rank raises ``error`` instead of joining their exchange.

    They get a RankMismatchError that says so. This rank waits for nobody.
    """
    meeting = _Meeting(members, doing, timeout=0)
    why = f"{type(error).__name__}: {message_of(error)}"
    with suppress(MissingRanksError), store_reached(doing):  # the refusal itself says more
        meeting.bring(None, why)
        if meeting.leads:
            meeting.announce(dict.fromkeys(meeting.members, (True, meeting.refusal({meeting.rank: why}))))


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


_Answer = tuple[bool, Any]  # whether to raise it, and what


class _Meeting:
    """The keys of one exchange."""

    def __init__(self, members: Sequence[int], doing: str, timeout: float) -> None:
        self.members, self.doing, self.timeout = list(members), doing, timeout
        self.rank = dist.get_rank()
        self.leads = self.rank == self.members[0]
        self.store = default_store()
        self.base = f"ddp_patch/{digest(self.members)}"
        self.unread = _unread.setdefault(self.base, {})

    def bring(self, record: Any, refusal: str = "") -> None:
        # Count in the store, so that a new process group starts from zero.
        self.number = self.store.add(f"{self.base}/count/{self.rank}", 1)
        self.store.set(f"{self.base}/at/{self.rank}", self.doing)
        self.unread[self.number] = [self._key("decision")] if self.leads else []
        self._put(self._key("record", self.rank), (self.doing, record, refusal))

    def judged(self, judge: Callable[[Mapping[int, Any]], Mapping[int, Any]]) -> _Answer:
        """Answer all members, on the first of them; return its own answer."""
        answers: Mapping[int, _Answer]
        elsewhere: dict[int, str] = {}  # what other ranks do here, where it is something else
        try:
            keys = {rank: self._key("record", rank) for rank in self.members}
            if not self._wait(list(keys.values()), self.timeout):
                raise self._missing(self.timeout)
            came = {rank: self._take(key) for rank, key in keys.items()}
            self._clear_earlier()
            elsewhere = {rank: doing for rank, (doing, _, _) in came.items() if doing != self.doing}
            if refused := {rank: why for rank, (_, _, why) in came.items() if why}:
                raise self.refusal(refused)  # caught below, and sent to all
            judged = judge({rank: record for rank, (_, record, _) in came.items()})
            answers = {rank: (False, answer) for rank, answer in judged.items()}
            if self._decide("judged") != "judged":
                raise MissingRanksError(
                    f"{self.doing}: rank {self.rank} arrived or answered too late: another of the ranks "
                    f"{self.members} had already stopped waiting for it. Look for what delayed it, or pass a longer "
                    "timeout=."
                )
        except DDPPatchError as error:
            answers = dict.fromkeys(self.members, (True, error))
        except Exception as error:  # noqa: BLE001 - the others wait for an answer, whatever happens here
            why = f"comparing the ranks raised {error!r}."
            if elsewhere:
                why = (
                    f"{_who_is_where(elsewhere)}. Every rank must get here, at the same point of the script. Look for "
                    "what these ranks do instead (an error that was caught, an if rank == 0)."
                )
            answers = dict.fromkeys(self.members, (True, RankMismatchError(f"{self.doing}: {why}")))
        self.announce(answers)
        return answers[self.rank]

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

    def end(self) -> None:
        """Note that all that this rank left is read: all but the decision."""
        self.unread[self.number][self.leads :] = []

    def _clear_earlier(self) -> None:
        """Delete what nobody read in earlier meetings: every member has left them."""
        for number in [number for number in self.unread if number < self.number]:
            for key in self.unread.pop(number):
                self.store.delete_key(key)

    def _decide(self, outcome: str) -> str:
        """Set the outcome of this exchange unless a member has set one already; return the outcome."""
        return self.store.compare_set(self._key("decision"), "", outcome).decode()

    def refusal(self, refused: Mapping[int, str]) -> RankMismatchError:
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
        for number, part in enumerate(slices):
            self.store.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # bytes are taken; the stubs say str
        self.store.set(key, str(len(slices)))  # last, so that the slices are there when it is
        self.unread[self.number] += [key, *(f"{key}/{number}" for number in range(len(slices)))]

    def _take(self, key: str) -> Any:
        slices = [f"{key}/{number}" for number in range(int(self.store.get(key)))]
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
        came = [rank for rank in self.members if self.store.add(f"{self.base}/count/{rank}", 0) >= self.number]
        missing = [rank for rank in self.members if rank not in came]
        if not missing:
            return MissingRanksError(
                f"{self.doing}: all ranks arrived, but rank {self.members[0]}, which compares them, did not answer "
                f"within {seconds:g} s. It is gone or stuck: look for its error and start all ranks again."
            )
        seen = already_in(self.store, {rank: f"{self.base}/at/{rank}" for rank in missing})
        last_seen = _who_is_where({rank: doing.decode() for rank, doing in seen.items()})
        return MissingRanksError(
            f"{self.doing}: {ranks_text(missing)} of {len(self.members)} did not arrive within {seconds:g} s; "
            f"{ranks_text(came)} did. {f'Last seen: {last_seen}. ' if seen else ''}Every rank must get here, at the "
            "same point of the script. Look for what the missing ranks do instead (an error, an if rank == 0, slow "
            "preparation), or pass a longer timeout=."
        )


def _who_is_where(doing: Mapping[int, str]) -> str:
    return "; ".join(f"{ranks_text(ranks)} at {what!r}" for what, ranks in by_value(doing).items())


@dataclass(frozen=True, slots=True)
class Leader:
    """Sends each member its share of an epoch, piece by piece; each piece is one exchange.

    In an exchange, every rank says which pass it is in, and gets its share of the piece. So each piece reveals a rank
    that is missing or in another pass, and no pass can take a piece that another left unread.

    Attributes:
        members: The global ranks; the first draws.
        timeout: How many seconds they wait for each other.
    """

    members: Sequence[int]
    timeout: float

    @property
    def is_leader(self) -> bool:
        """Whether this rank draws for all."""
        return dist.get_rank() == self.members[0]

    def send(
        self,
        of_all: Iterator[Sequence[Sequence[T]]],
        facts: Mapping[str, object],
        note: Callable[[bool], Any],
        first_piece: int,
        largest_piece: int = LARGEST_PIECE,
    ) -> Iterator[list[T]]:
        """Send every member its share of each piece, and yield this rank's own.

        Args:
            of_all: The stream in parts, each with one sequence for every member.
            facts: Which pass this is.
            note: Returns the note to send with a piece; called with whether the piece is the last.
            first_piece: How many items, all ranks' together, the first message should hold.
            largest_piece: How many items a later message may hold.

        Raises:
            Exception: What drawing the stream raises. The other ranks get a LeaderError.
        """
        pieces = _pieces(of_all, len(self.members), first_piece, largest_piece)
        try:
            for share, _ in self._shares(facts, ((piece, note(is_last), is_last) for piece, is_last in pieces)):
                yield share
            return
        except LeaderError as error:
            failure = error.__cause__ or error
        raise failure

    def receive(self, facts: Mapping[str, object], take_note: Callable[[Any], object]) -> Iterator[list[Any]]:
        """Yield this rank's share of each piece, after passing the piece's note to ``take_note``.

        Raises:
            LeaderError: Drawing raised an error on the first rank, which raises that error itself.
            RankMismatchError: A rank is in another pass.
            MissingRanksError: A rank did not arrive in time or is gone.
        """
        for share, note in self._shares(facts, iter(())):
            take_note(note)
            yield share

    def _shares(self, facts: Mapping[str, object], pieces: Iterator[_Piece]) -> Iterator[tuple[list[Any], Any]]:
        is_last = False
        while not is_last:
            share, note, is_last = exchange(self.members, _SENDING, facts, partial(self._next, pieces), self.timeout)
            yield unpacked(share), note

    def _next(
        self, pieces: Iterator[_Piece], of_ranks: Mapping[int, Mapping[str, object]]
    ) -> dict[int, tuple[bytes, Any, bool]]:
        """Draw the next piece once every rank asks for it."""
        require_same(_SENDING, of_ranks)
        try:
            shares, note, is_last = next(pieces)
            return {rank: (packed(share), note, is_last) for rank, share in zip(self.members, shares, strict=True)}
        except Exception as error:
            raise LeaderError(
                f"Rank {self.members[0]} draws for all ranks, and its sampler raised {error!r}, so no rank can "
                "continue. See the error of that rank."
            ) from error


def _pieces(
    of_all: Iterator[Sequence[Sequence[T]]], count: int, most: int, largest: int
) -> Iterator[tuple[list[list[T]], bool]]:
    """Join parts into pieces of about ``most`` items, doubling up to ``largest``; say with each if it is the last.

    Every piece but the last has equally many items for each member, so all need the next piece at the same step.
    """
    ended = False
    while not ended:
        piece: list[list[T]] = [[] for _ in range(count)]
        while not ended and (sum(map(len, piece)) < most or len(set(map(len, piece))) > 1):
            shares = next(of_all, None)
            ended = shares is None
            for mine, more in zip(piece, shares or (), strict=False):
                mine += more
        yield piece, ended
        most = min(2 * most, largest)
