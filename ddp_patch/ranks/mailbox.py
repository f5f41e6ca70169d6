"""Mailboxes in the process group's store, in which ranks leave each other records. Nobody waits for one."""

import warnings
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchWarning, RankMismatchError, WorldError
from ddp_patch.ranks.exchange import digest

__all__ = ["Mailbox", "agreed_mailbox", "mailbox_of_explicit_world", "unwatched"]

# Which process group it is of those that had the same store, and how often loaders that look alike were patched in it.
_given: WeakKeyDictionary[Any, tuple[int, Counter[str]]] = WeakKeyDictionary()

# What stores raise that are gone; a fake group's holds nothing that can be read.
_STORE_ERRORS = (RuntimeError, ValueError)

_IS_WATCHED = ContextVar("_IS_WATCHED", default=True)

# What was left about the last loaders that are gone on this rank stays, so that slower ranks may read it.
_GONE_KEPT = 8
_gone: deque[tuple[ref[Any], Collection[str]]] = deque()

_NEVER = b"~"  # no value that anybody leaves


class Mailbox:
    """What the ranks leave each other about one loader, in the store of the process group in which it was patched.

    Each rank leaves a record. It reads rank 0's, and that of another, in turn; and whether somebody has left a mismatch
    for all. So what a rank pays does not grow with the number of ranks.

    Args:
        key: Names the loader in the store.
        group: Names these ranks, alike for all of their loaders.
        rank: This process's global rank.
        members: The global ranks of all of them.
        keys: What this rank has left there already.
        read_one_stream: Whether all shard one stream: a process group may contain several explicit worlds.

    Attributes:
        has_failed: Whether the store has failed, and has answered nothing since. The first time is warned of.
    """

    def __init__(
        self,
        key: str,
        group: str,
        rank: int,
        members: Sequence[int],
        keys: Sequence[str] = (),
        read_one_stream: bool = True,
    ) -> None:
        self.group: str = group
        self.rank: int = rank
        self.members: Sequence[int] = members
        self.read_one_stream: bool = read_one_stream
        self._key = key
        # No more than a reference: a store that is kept keeps its port, too.
        self._store: ref[Any] | None = ref(default_store())
        self.has_failed: bool = False
        self._has_warned = False
        self._left: dict[str, str] = {}
        self._place, self._turn = members.index(rank), 0
        self._keys = {*keys}  # all that this rank has left
        _delete_gone()
        finalize(self, _gone.append, (self._store, self._keys)).atexit = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the loader makes passes of its own, which other ranks need not know about

    @property
    def is_open(self) -> bool:
        """Whether anybody may still leave or read some: the process group is there, and its store."""
        return self._open_store() is not None

    def post(self, record: str, subject: str) -> None:
        """Leave a record about a subject, unless it is there already."""
        if record != self._left.get(subject):
            self._left[subject] = record
            self._put(f"{self._key}/{subject}/{self.rank}", record)

    def leave(self, name: str, value: str) -> None:
        """Leave a value that is all ranks', not this one's."""
        self._put(f"{self._key}/{name}", value)

    def left(self, name: str) -> str | None:
        """Return a value that some rank has left for all; None if none has."""
        value = self._value(f"{self._key}/{name}")
        return None if value is None else value.decode(errors="replace")

    def count(self, name: str, more: int) -> int:
        """Add to a number that is all ranks', and return it."""
        key = f"{self._key}/{name}"
        self._keys.add(key)
        return int(self._asked("add", key, more) or 0)

    def read(self) -> dict[int, bytes]:
        """Return what rank 0 and another one have left about their passes, as far as they have."""
        members = self.members
        self._turn = self._turn % max(1, len(members) - 1) + 1
        ranks = {members[0], members[(self._place + self._turn) % len(members)]} - {self.rank}
        return self.read_of(sorted(ranks), "passes")

    def read_of(self, ranks: Sequence[int], subject: str) -> dict[int, bytes]:
        """Return what some ranks have left about a subject."""
        found = {rank: self._value(f"{self._key}/{subject}/{rank}") for rank in ranks}
        return {rank: value for rank, value in found.items() if value is not None}

    def tell(self, text: str) -> None:
        """Leave a mismatch for all, as ``told``, unless one is there."""
        self._asked("compare_set", f"{self._key}/told", "", text)

    def _put(self, key: str, value: str) -> None:
        """Leave a value in the least time: neither the store nor the process group is asked anything."""
        store = None if self._store is None else self._store()
        self._keys.add(key)
        try:
            if store is not None:
                store.set(key, value)
        except _STORE_ERRORS as error:
            self._fail(error)

    def _value(self, key: str) -> bytes | None:
        """Return what is left under a key now; None if nothing is. Whoever asks a store to get that would wait."""
        value: bytes | None = self._asked("compare_set", key, _NEVER.decode(), _NEVER.decode())
        return None if value == _NEVER else value

    def _asked(self, operation: str, *arguments: Any) -> Any:
        """Return what the store answers; None if it is gone or fails."""
        if (store := self._open_store()) is None:
            return None
        try:
            answer = getattr(store, operation)(*arguments)
        except _STORE_ERRORS as error:
            self._fail(error)
            return None
        self.has_failed = False
        return answer

    def _fail(self, error: Exception) -> None:
        """Note that the store failed, and warn the first time; what was left may not be there."""
        self.has_failed = True
        self._left.clear()
        if self.is_open and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "The ranks cannot compare their passes over a loader now, because the process group's store failed "
                f"({type(error).__name__}: {error}). They go on, and compare again once it answers. If it does not, "
                "look for the rank or the network that is gone.",
                DDPPatchWarning,
                stacklevel=2,
            )

    def _open_store(self) -> Any:
        """Return the store, or None if it is gone."""
        if self._store is None or not dist.is_initialized():
            return None
        store = self._store()
        return store if store is default_store() else None


def _delete_gone() -> None:
    """Delete what this rank has left about loaders that are gone, but for the last ones."""
    while len(_gone) > _GONE_KEPT:
        with suppress(IndexError, *_STORE_ERRORS):  # another thread took it; or the store is gone
            store, keys = _gone.popleft()
            for key in keys if dist.is_initialized() and store() is default_store() else ():
                default_store().delete_key(key)


def agreed_mailbox(members: Sequence[int], number: int) -> Mailbox:
    """Return the mailbox of the ranks that made an agreement with this one."""
    group = f"ddp_patch/p{digest(list(members))[:8]}"
    return Mailbox(f"{group}/{number}", group, dist.get_rank(), members)


def mailbox_of_explicit_world(share: int, num_replicas: int, described: Mapping[str, object]) -> Mailbox | None:
    """Return the mailbox of the ranks that may share in an explicit world; None if there is nothing to compare.

    All ranks of the process group may. The n-th loader that looks like this one is the n-th on every rank.

    Args:
        share: Which share this rank takes.
        num_replicas: Of how many.
        described: How the loader looks.

    Raises:
        WorldError: There are more shares than ranks.
        RankMismatchError: Too many ranks take the same share.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1 or num_replicas == 1 or not _IS_WATCHED.get():
        return None
    if num_replicas > ranks:
        raise WorldError(
            f"num_replicas={num_replicas} was given in a process group of {ranks} ranks, so no rank would take some of "
            "the shards. Leave rank= and num_replicas= out, or simulate other worlds without a process group."
        )
    rank, store, most = dist.get_rank(), default_store(), ranks // num_replicas
    try:
        if store not in _given:
            _given[store] = store.add(f"ddp_patch/given/{rank}", 1), Counter()
        group, counts = _given[store]
        base = f"ddp_patch/given/{group}/{num_replicas}"
        key = f"{base}/{digest(sorted(described.items()))}"
        counts[key] += 1
        key = f"{key}/{counts[key]}"
        taken = f"{key}/share/{share}"
        takers = store.add(taken, 1)
        text = (
            f"rank= and num_replicas= contradict the process group: rank {rank} is number {takers} of the ranks that "
            f"take shard {share} of {num_replicas}, and only {most} of the group's {ranks} ranks may, so other samples "
            "would be lost. Leave rank= and num_replicas= out, or pass torch.distributed.get_rank() and "
            "get_world_size(): LOCAL_RANK repeats on every node."
        )
        if takers > most:
            store.set(f"{key}/told", text)
    except _STORE_ERRORS:
        return None
    if takers > most:
        raise RankMismatchError(text)
    return Mailbox(key, base, rank, range(ranks), [taken], num_replicas == ranks)


@contextmanager
def unwatched() -> Iterator[None]:
    """Allow explicit worlds that only simulate ranks."""
    token = _IS_WATCHED.set(False)
    try:
        yield
    finally:
        _IS_WATCHED.reset(token)
