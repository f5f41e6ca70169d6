"""Collect a record from every rank, and send every rank an answer, within a deadline; pickle values for other ranks.

The ranks use the process group's key-value store, not a collective. So an exchange works with any backend and any
subset of ranks, leaves no group behind, and can name the missing ranks.
"""

import hashlib
import io
import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch import errors
from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError, message_of

# The most ranks, and the most values, that an error lists.
FEW = 16


def ranks_text(numbers: Sequence[int]) -> str:
    """Return the ranks in words.

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


def who_has_what(holders: Mapping[Any, list[int]]) -> str:
    """Return which ranks have which value, in words, the smallest group of ranks first; of many, the rest as one."""
    parties = sorted(holders.items(), key=lambda party: (len(party[1]), min(party[1])))
    few = len(parties) if sum(map(len, holders.values())) <= FEW else min(len(parties), FEW) - 1
    told = [f"{value} on {ranks_text(members)}" for value, members in parties[:few]]
    if others := parties[few:]:
        value = others[0][0] if len(others) == 1 else f"{len(others)} other values"
        told.append(f"{value} on the other {sum(len(members) for _, members in others)}")
    return "; ".join(told)


def parties_text(holders: Mapping[Any, list[int]]) -> str:
    """Return the ranks with each value, in words."""
    parties = [*holders.values()]
    others = sum(map(len, parties[FEW:]))
    return " and ".join([*map(ranks_text, parties[:FEW]), *([f"{others} others"] if others else [])])


def require_same(doing: str, records: Mapping[int, Mapping[str, object]]) -> None:
    """Raise RankMismatchError, with a table of the ranks' values, unless every rank's facts are the same."""
    names = dict.fromkeys(name for record in records.values() for name in record)
    told = {name: {rank: str(record.get(name, "nothing")) for rank, record in records.items()} for name in names}
    if differing := {name: holders for name in names if len(holders := by_value(told[name])) > 1}:
        rows = "\n".join(f"  {name}: {who_has_what(holders)}" for name, holders in differing.items())
        raise RankMismatchError(
            f"{doing}: the ranks differ, so their shards would overlap or their steps would not be equal.\n{rows}\n"
            "Make these the same on every rank, and call and iterate the same loaders on each."
        )


def digest(value: object) -> str:
    """Return a short hash of a value, the same on every rank."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


# The first member waits for all others, which wait this much longer for its answer.
MARGIN_S = 5.0

# The error of the first exchange of the same members in which a rank was missing. Exchanges are counted, so a later one
# might compare ranks at different points of the script. A later exchange therefore raises this error.
_missed: dict[tuple[str, int], str] = {}


Judge: TypeAlias = Callable[[Mapping[int, Any]], Any]

# A record or an answer, as JSON: what the rank is doing; why it refuses to take part, or an empty text; the error to
# raise, by the name of its class and its text; and the content.
_Message: TypeAlias = dict[str, Any]


def exchange(members: Sequence[int], doing: str, record: Any, judge: Judge, timeout: float) -> Any:
    """Send this rank's record to the first member, and return that member's answer.

    Records and answers are JSON, and no rank runs code from another. A tuple arrives as a list, and an object that JSON
    does not know as its text.

    Args:
        members: The global ranks that take part. Each must call this function, with the same members in the same order.
        doing: What the ranks are doing, for the error.
        record: This rank's record, for the judge.
        judge: Called on the first member with every rank's record. Returns the answer for all ranks. If it raises a
            ``DDPPatchError``, every rank raises this error.
        timeout: How many seconds the first member waits for the others.

    Raises:
        MissingRanksError: A rank did not arrive in time, in this exchange or an earlier one.
        RankMismatchError: A rank refused to take part.
    """
    whose = _base(members), dist.get_rank()
    try:
        with store_reached(doing):
            meeting = _Meeting(members, doing, timeout, record)
            return meeting.judged(judge) if meeting.leads else meeting.answered()
    except MissingRanksError as error:
        _missed.setdefault(whose, message_of(error))
        raise


def refuse(members: Sequence[int], doing: str, error: Exception) -> None:
    """Tell the other members that this rank raises ``error`` instead of joining their exchange.

    The other members raise a RankMismatchError with the text of ``error``. This rank does not wait.
    """
    why = f"{type(error).__name__}: {message_of(error)}"
    with suppress(MissingRanksError), store_reached(doing):  # the error that this rank raises says more
        meeting = _Meeting(members, doing, 0, None, why)
        if meeting.leads:
            meeting.announce(refusal(doing, {meeting.rank: why}))


def refusal(doing: str, refused: Mapping[int, str]) -> RankMismatchError:
    """Return an error that lists the ranks that cannot continue, and why."""
    listed = "\n".join(f"  {ranks_text(ranks)}: {why}" for why, ranks in by_value(refused).items())
    return RankMismatchError(
        f"{doing}: not every rank could continue.\n{listed}\nCorrect the error above and start all ranks again."
    )


@contextmanager
def store_reached(doing: str) -> Iterator[None]:
    """While entered, raise MissingRanksError if the store is gone."""
    try:
        yield
    except DDPPatchError:
        raise
    except RuntimeError as error:  # from the store's operations; other RuntimeErrors are caught where they are raised
        raise MissingRanksError(
            f"{doing}: the process group's store cannot be reached ({error}). The process that holds it, mostly rank "
            "0's, has ended. Look for its error and start all ranks again."
        ) from error


def _base(members: Sequence[int]) -> str:
    """Return the first part of the keys of some ranks."""
    return f"ddp_patch/{digest([*members])}"


class _Meeting:
    """One exchange, by keys in the store.

    A rank makes equally many requests for any number of ranks.

    Args:
        members, doing, timeout, record: As in ``exchange``.
        refusal: Why this rank refuses to take part; empty if it takes part.
    """

    def __init__(self, members: Sequence[int], doing: str, timeout: float, record: Any, refusal: str = "") -> None:
        self.members, self.doing, self.timeout, self.rank = [*members], doing, timeout, dist.get_rank()
        self.store: Any = default_store()
        self.base = _base(members)
        # Count exchanges in the store, so that a new process group starts from zero.
        self.number = self.store.add(f"{self.base}/count/{self.rank}", 1)
        if self.number == 1:
            _missed.pop((self.base, self.rank), None)
        if (missed := _missed.get((self.base, self.rank))) is not None:
            raise MissingRanksError(
                f"{doing}: {ranks_text(members)} may be at different points of the script since an earlier call, in "
                f"which one was missing. {missed} Start all ranks again."
            )
        self.own = _message(doing=doing, refusal=refusal, content=_as_read(record))
        if not self.leads:  # the first member reads its own record here
            self._leave(self.own, f"record/{self.rank}")

    @property
    def leads(self) -> bool:
        """Whether this rank is the first member."""
        return self.rank == self.members[0]

    # No error is kept in a variable: its traceback would refer to the caller's loader, and keep the workers alive.

    def judged(self, judge: Judge) -> Any:
        """On the first member: answer all members; return the answer, or raise the error that all members get."""
        try:
            answer = _as_read(judge(self._records()))
            if self._decide("judged") != "judged":
                raise self._missing([self.rank], self.timeout + MARGIN_S, "answer", "another has given up")
        except DDPPatchError as error:
            self.announce(error)
            raise
        except Exception as error:  # the other members wait for an answer, whatever happens here
            raise self.announce(RankMismatchError(f"{self.doing}: comparing the ranks raised {error!r}.")) from error
        self._leave(_message(content=answer), "answer")
        return answer

    def announce(self, failure: DDPPatchError) -> DDPPatchError:
        """Let all other members raise an error, of the nearest class in ``errors``; return the error."""
        kind = next(kind for kind in type(failure).__mro__ if kind.__module__ == errors.__name__)
        self._leave(_message(error=(kind.__name__, message_of(failure))), "answer")
        return failure

    def answered(self) -> Any:
        """Wait for the first member's answer: return its content, or raise its error."""
        key, seconds = self._key("answer"), self.timeout + MARGIN_S
        # One value in the store decides the outcome, so either all ranks get an answer or none, however late a rank
        # arrives.
        came = self._wait([key], seconds) or (self._decide("given up") == "judged" and self._wait([key], MARGIN_S))
        if not came:
            raise self._missing([self.members[0]], seconds, "answer", "it compares the ranks")
        message: _Message = json.loads(self.store.get(key))
        self._clear()
        if message["error"]:
            name, text = message["error"]
            raise getattr(errors, name)(text)
        return message["content"]

    def _records(self) -> dict[int, Any]:
        """On the first member: return every rank's record; raise an error if a rank refuses, or does something else."""
        came, others = {self.rank: self.own}, self.members[1:]
        if keys := [self._key(f"record/{rank}") for rank in others]:
            if not self._wait(keys, self.timeout):
                missing = [rank for rank, key in zip(others, keys, strict=True) if not self.store.check([key])]
                here = ranks_text([rank for rank in self.members if rank not in set(missing)])
                if missing:
                    raise self._missing(missing, self.timeout, "arrive", f"{here} did")
            came.update(zip(others, map(json.loads, self.store.multi_get(keys)), strict=True))
        self._clear()
        if refused := {rank: message["refusal"] for rank, message in came.items() if message["refusal"]}:
            raise refusal(self.doing, refused)
        if elsewhere := {rank: message["doing"] for rank, message in came.items() if message["doing"] != self.doing}:
            where = "; ".join(f"{ranks_text(ranks)} at {doing!r}" for doing, ranks in by_value(elsewhere).items())
            raise RankMismatchError(
                f"{self.doing}: {where}. Every rank must get here, at the same point of the script. Look for what "
                "these ranks do instead (a caught error, an if rank == 0)."
            )
        return {rank: message["content"] for rank, message in came.items()}

    def _clear(self) -> None:
        """Delete the keys that this rank has set in the exchange before: every member has come to this one since."""
        for what in ("answer", "decision") if self.leads else (f"record/{self.rank}",):
            self.store.delete_key(f"{self.base}/{self.number - 1}/{what}")

    def _leave(self, message: _Message, what: str) -> None:
        self.store.set(self._key(what), json.dumps(message))

    def _decide(self, outcome: str) -> str:
        """Set the outcome of this exchange unless a member has set one already; return the outcome."""
        return str(self.store.compare_set(self._key("decision"), "", outcome).decode())

    def _key(self, what: str) -> str:
        return f"{self.base}/{self.number}/{what}"

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Return whether all keys arrive in time."""
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:  # the only timeout error that all stores have in common
            return bool(self.store.check(keys))  # raises if the store is gone
        return True

    def _missing(self, ranks: Sequence[int], seconds: float, what: str, known: str) -> MissingRanksError:
        return MissingRanksError(
            f"{self.doing}: {ranks_text(ranks)} of {len(self.members)} did not {what} within {seconds:g} s; {known}. "
            "Every rank must get here, at the same point of the script. Look for what the missing ranks do instead (an "
            "error, an if rank == 0, slow preparation), or pass a longer timeout=."
        )


def _message(doing: str = "", refusal: str = "", error: Sequence[str] | None = None, content: Any = None) -> _Message:
    return {"doing": doing, "refusal": refusal, "error": error, "content": content}


def _as_read(value: Any) -> Any:
    """Return a value as another rank reads it from JSON."""
    return json.loads(json.dumps(value, default=str))


# ---- values that travel ----


def packed(value: Any) -> bytes:
    """Pickle a value of the user's. Tensors arrive detached, and tensors on other devices are copied through the CPU.

    Unpickling runs code that the sender chooses: SECURITY.md lists where.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpacked(data: Any) -> Any:
    """Return the value that ``packed`` has pickled."""
    return pickle.loads(data)  # noqa: S301 - from a rank of this training


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values; a contiguous tensor on the CPU shares its memory."""
    plain: torch.Tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    dense = plain.contiguous()  # its dimensions of one element may still have any stride
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """A pickler that pickles only the values of a tensor; torch would pickle the whole storage of a view."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a tensor, or NotImplemented for the usual way."""
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized
        if not is_plain or value.is_meta:
            return NotImplemented
        data = bytes_of(value).numpy() if value.numel() else np.empty(0, np.uint8)
        return _tensor, (data, value.dtype, tuple(value.shape), value.device.type)


def _tensor(data: Any, dtype: torch.dtype, shape: Sequence[int], device: str) -> torch.Tensor:
    """Rebuild a tensor from its bytes."""
    return torch.from_numpy(data).view(dtype).reshape(shape).to(device)
