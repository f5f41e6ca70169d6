"""Claims in the process group's store: what the first rank says of something counts. Nobody waits for another rank."""

import atexit
import warnings
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchWarning, RankMismatchError, WorldError
from ddp_patch.ranks.exchange import digest
from ddp_patch.ranks.patient_store import STORE_ERRORS, PatientStore

__all__ = ["Claims", "agreed_claims", "claims_of_explicit_world", "unwatched"]

# Which process group it is of those that had the same store, and how often loaders that look alike were patched in it.
_given: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_patched: WeakKeyDictionary[Any, defaultdict[str, int]] = WeakKeyDictionary()

_IS_WATCHED = ContextVar("_IS_WATCHED", default=True)

# What was left about the last loaders that are gone on this rank stays, so that slower ranks may read it.
_GONE_KEPT = 8
_gone: deque[tuple[ref[Any], Collection[str]]] = deque()

# Whose ranks are told when this process exits.
_alive: WeakSet["Claims"] = WeakSet()

_NEVER = "~"  # no value that anybody leaves
# Begins a mismatch that is told to all; a number there says which pass all ranks have begun.
_MISMATCH = "!"


class Claims:
    """What the ranks say of one loader, in the store of the process group in which it was patched.

    A rank claims a fact by its name: if no rank has, its own word counts from then on; else it gets the word that does.
    So all ranks are compared with one word, and what a rank pays does not grow with their number.

    Args:
        key: Names the loader in the store.
        group: Names these ranks, alike for all of their loaders.
        rank: This process's global rank.
        members: The global ranks of all of them.
        keys: What this rank has left there already.
        read_one_stream: Whether all shard one stream: a process group may contain several explicit worlds.

    Attributes:
        group, rank, members, read_one_stream: As given.
        store: The store, which may fail.
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
        self.store: PatientStore = PatientStore()
        self._keys = {*keys}  # all that this rank has left
        self._forgotten = -1  # the latest pass of which this is deleted
        _delete_gone()
        _alive.add(self)
        finalize(self, _gone.append, (self.store.ref, self._keys)).atexit = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the loader makes passes of its own, which other ranks need not know about

    def claim(self, name: str, value: str) -> str:
        """Set a fact unless some rank has, and return what counts; the value itself if nobody can tell."""
        found = self.store.ask("compare_set", self._path(name), "", value)
        if found is not None and found.decode(errors="replace") != value:
            return str(found.decode(errors="replace"))
        self._owned(name)
        return value

    def put(self, name: str, value: str) -> bool:
        """Set a value in the least time, without an answer; return whether the store took it."""
        return self.store.set(self._owned(name), value)

    def value(self, name: str) -> str | None:
        """Return what is set now; None if nothing is. Whoever asks a store to get that would wait."""
        found = self.store.ask("compare_set", self._path(name), _NEVER, _NEVER)
        text = _NEVER if found is None else str(found.decode(errors="replace"))
        return None if text == _NEVER else text

    def _path(self, name: str) -> str:
        """Return the key of a name; one that begins with a slash is of all of these ranks' loaders."""
        return f"{self.group}{name}" if name.startswith("/") else f"{self._key}/{name}"

    def _owned(self, name: str) -> str:
        """Return the key of a name, and note that this rank is to delete it."""
        if not name.startswith("/"):
            self._keys.add(self._path(name))
        return self._path(name)

    def add(self, name: str, more: int) -> int:
        """Add to a number that is all ranks', and return it; 0 if nobody can tell."""
        found = int(self.store.ask("add", self._path(name), more) or 0)
        if found >= len(self.members):  # the last one of them is to delete it
            self._owned(name)
        return found

    def forget_passes(self, until: int) -> None:
        """Delete what this rank has left of passes up to a number, as names that begin with theirs."""
        while self._forgotten < until:
            self._forgotten += 1
            of_pass = f"{self._key}/{self._forgotten}/"
            for key in [key for key in self._keys if key.startswith(of_pass)]:
                self.store.ask("delete_key", key)
                self._keys.discard(key)

    # ---- what all are told ----

    def hear(self) -> int:
        """Return the number of the latest pass that all ranks have begun, as far as they told; -1 before the first.

        Raises:
            RankMismatchError: A rank has found one.
        """
        told = self.value("told") or ""
        if told.startswith(_MISMATCH):
            raise RankMismatchError(told.removeprefix(_MISMATCH))
        return int(told) if told.isdecimal() else -1

    def tell(self, told: str | int) -> None:
        """Tell all of a mismatch, or which pass all have begun, unless a mismatch is told already."""
        said, before = f"{told}" if isinstance(told, int) else _MISMATCH + told, self.value("told") or ""
        while not before.startswith(_MISMATCH):
            found = self.store.ask("compare_set", self._path("told"), before, said)
            if found is None or (now := found.decode(errors="replace")) == said:
                break
            before = now


@atexit.register
def _leave_marks_of_exit() -> None:
    for claims in [*_alive]:
        with suppress(*STORE_ERRORS):  # the process that holds it may have ended before
            if (store := claims.store.opened()) is not None:
                store.set(claims._path(f"exit/{claims.rank}"), "1")


def _delete_gone() -> None:
    """Delete what this rank has left about loaders that are gone, but for the last ones."""
    while len(_gone) > _GONE_KEPT:
        with suppress(IndexError, *STORE_ERRORS):  # another thread took it; or the store is gone
            store, keys = _gone.popleft()
            for key in keys if dist.is_initialized() and store() is default_store() else ():
                default_store().delete_key(key)


def agreed_claims(members: Sequence[int], token: str) -> Claims:
    """Return the claims of the ranks that made an agreement with this one, which have a token from it."""
    key = f"ddp_patch/p{digest(list(members))[:8]}/{token}"
    return Claims(key, key.rpartition("/")[0], dist.get_rank(), members)


def claims_of_explicit_world(share: int, num_replicas: int, described: Mapping[str, object]) -> Claims | None:
    """Return the claims of the ranks that may share in an explicit world; None if there is nothing to compare.

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
    # Counted even where the store fails, which it may do on this rank alone.
    like, counts = f"{num_replicas}/{digest(sorted(described.items()))}", _patched.setdefault(store, defaultdict(int))
    counts[like] += 1
    try:
        if store not in _given:
            _given[store] = store.add(f"ddp_patch/given/{rank}", 1)
        base = f"ddp_patch/given/{_given[store]}"
        key = f"{base}/{like}/{counts[like]}"
        taken = f"{key}/share/{share}"
        takers = store.add(taken, 1)
        text = (
            f"rank= and num_replicas= contradict the process group: rank {rank} is number {takers} of the ranks that "
            f"take shard {share} of {num_replicas}, and only {most} of the group's {ranks} ranks may, so other samples "
            "would be lost. Leave rank= and num_replicas= out, or pass torch.distributed.get_rank() and "
            "get_world_size(): LOCAL_RANK repeats on every node."
        )
        if takers > most:
            store.set(f"{key}/told", _MISMATCH + text)
    except STORE_ERRORS as error:
        warnings.warn(
            f"The ranks cannot compare which of them takes shard {share} of {num_replicas}, nor their passes over this "
            f"loader, because the process group's store failed at the patch ({type(error).__name__}: {error}). "
            "They go on. Look for the rank or the network that is gone.",
            DDPPatchWarning,
            stacklevel=2,
        )
        return None
    if takers > most:
        raise RankMismatchError(text)
    return Claims(key, f"{base}/{num_replicas}", rank, range(ranks), [taken], num_replicas == ranks)


@contextmanager
def unwatched() -> Iterator[None]:
    """Allow explicit worlds that only simulate ranks."""
    token = _IS_WATCHED.set(False)
    try:
        yield
    finally:
        _IS_WATCHED.reset(token)
