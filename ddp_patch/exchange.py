"""One record from every rank, one verdict for all, within a deadline.

The ranks meet in the key-value store that the process group was made with. So an exchange needs no collective: it
works with any backend, on any subset of the ranks, and can say who is missing.
"""

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ddp_patch.errors import DDPPatchError, MissingRanksError, RankMismatchError

__all__ = ["exchange", "ranks_text"]

V = TypeVar("V")

# How much longer than the first member, which waits for all, the others wait for its verdict.
MARGIN_S = 5.0


def exchange(
    members: Sequence[int], doing: str, record: Any, judge: Callable[[Mapping[int, Any]], V], timeout: float
) -> V:
    """Send this rank's record to the first member, and return what that one makes of all of them.

    Args:
        members: The global ranks that take part; each must call this, with the same members and in the same order.
        doing: What the ranks are about, for the error.
        record: Anything that can be pickled.
        judge: Called on the first member with every rank's record; what it returns, or the ``DDPPatchError`` that it
            raises, is returned or raised on every rank.
        timeout: How many seconds the first member waits for the others.

    Raises:
        MissingRanksError: A rank did not come in time.
    """
    meeting = _Meeting(members, doing, timeout)
    meeting.bring(record)
    if meeting.rank == members[0]:
        verdict = meeting.judged(judge)
        meeting.announce(verdict)
    else:
        verdict = meeting.announced()
    outcome, content = verdict
    if outcome == "raise":
        raise content
    return content  # type: ignore[no-any-return]  # what the first member's judge returned


_Verdict = tuple[Literal["return", "raise"], Any]


class _Meeting:
    """The keys of one exchange."""

    def __init__(self, members: Sequence[int], doing: str, timeout: float) -> None:
        self.members, self.doing, self.timeout = list(members), doing, timeout
        self.rank = dist.get_rank()
        self.store = _get_default_store()
        self.base = "ddp_patch/" + hashlib.blake2b(repr(self.members).encode(), digest_size=8).hexdigest()

    def bring(self, record: Any) -> None:
        # Counted in the store, so that a new process group begins anew.
        self.number = self._try(lambda: self.store.add(f"{self.base}/count/{self.rank}", 1))
        self._try(lambda: self.store.set(self._key(self.rank), pickle.dumps(record)))  # type: ignore[arg-type]  # bytes are taken; the stubs say str

    def judged(self, judge: Callable[[Mapping[int, Any]], Any]) -> _Verdict:
        keys = [self._key(rank) for rank in self.members]
        try:
            self._wait(keys, self.timeout)
            records = [pickle.loads(self.store.get(key)) for key in keys]  # noqa: S301 - our own ranks'
            return "return", judge(dict(zip(self.members, records, strict=True)))
        except DDPPatchError as error:
            return "raise", error
        except Exception as error:  # noqa: BLE001 - the others wait for a verdict, whatever it is
            return "raise", RankMismatchError(f"{self.doing}: comparing the ranks raised {error!r}.")
        finally:
            for key in [*keys, self._key("verdict", self.number - 1)]:  # who came here has read the one before
                with suppress(RuntimeError):
                    self.store.delete_key(key)

    def announce(self, verdict: _Verdict) -> None:
        self.store.set(self._key("verdict"), pickle.dumps(verdict))  # type: ignore[arg-type]  # as above

    def announced(self) -> _Verdict:
        self._wait([self._key("verdict")], self.timeout + MARGIN_S)
        verdict: _Verdict = pickle.loads(self.store.get(self._key("verdict")))  # noqa: S301 - our own first member's
        return verdict

    def _key(self, what: int | str, number: int | None = None) -> str:
        return f"{self.base}/{self.number if number is None else number}/{what}"

    def _wait(self, keys: list[str], seconds: float) -> None:
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:  # stores have no narrower one in common for a wait that was too long
            raise self._missing(seconds) from error

    def _try(self, operation: Callable[[], V]) -> V:
        try:
            return operation()
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def _missing(self, seconds: float) -> MissingRanksError:
        came = [rank for rank in self.members if self._try(partial(self._has_come, rank))]
        missing = [rank for rank in self.members if rank not in came]
        if not missing:
            return MissingRanksError(
                f"{self.doing}: all ranks came, but rank {self.members[0]}, which compares them, did not answer within "
                f"{seconds:g} s. It is gone or stuck: look for its error and start all ranks again."
            )
        return MissingRanksError(
            f"{self.doing}: {ranks_text(missing)} of {len(self.members)} did not come within {seconds:g} s; "
            f"{ranks_text(came)} did. Every rank must come here, at the same point of the script. Look for what the "
            "missing ranks do instead (an error, an if rank == 0, slow preparation), or pass a longer timeout=."
        )

    def _has_come(self, rank: int) -> bool:
        return self.store.add(f"{self.base}/count/{rank}", 0) >= self.number

    def _unreachable(self, error: Exception) -> MissingRanksError:
        return MissingRanksError(
            f"{self.doing}: the store through which the ranks meet cannot be reached ({error}). The process that holds "
            "it, mostly rank 0's, has ended. Look for its error and start all ranks again."
        )


def ranks_text(numbers: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
