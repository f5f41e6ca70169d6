"""Claims in the process group's store: the first value that a rank sets for a fact counts. No rank waits."""

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

# By store: the number of the process group among the groups that had the store; the numbers of loaders with equal facts
# that were patched in an explicit world.
_given: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_patched: WeakKeyDictionary[Any, defaultdict[str, int]] = WeakKeyDictionary()

_IS_WATCHED = ContextVar("_IS_WATCHED", default=True)

# The values of this many loaders that were deleted last stay in the store, so that slower ranks may read them.
_GONE_KEPT = 8
_gone: deque[tuple[ref[Any], Collection[str]]] = deque()

# The claims by which other ranks learn that this process exits.
_alive: WeakSet["Claims"] = WeakSet()

_NEVER = "~"  # no rank sets this value
# The first letter of a mismatch in the value for all ranks. Otherwise this value is the number of the latest pass that
# all ranks have begun.
_MISMATCH = "!"


class Claims:
    """The facts that ranks claim about one loader, in the store of the process group in which the loader was patched.

    A rank claims a value for a fact: the first rank's value counts from then on, and every later rank gets it as the
    answer. So all ranks are compared with one value, and a rank's cost does not grow with their number.

    Args:
        key: The name of the loader in the store.
        group: A name of these ranks, the same for all of their loaders.
        rank: This process's global rank.
        members: The global ranks that claim.
        keys: The keys that this rank has set before.
        read_one_stream: Whether all members shard one stream: a process group may contain several explicit worlds.

    Attributes:
        group, rank, members, read_one_stream: The arguments.
        store: The process group's store, which may fail.
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
        self._keys = {*keys}  # all keys that this rank has set
        self._forgotten = -1  # the latest pass whose keys are deleted
        _delete_gone()
        _alive.add(self)
        finalize(self, _gone.append, (self.store.ref, self._keys)).atexit = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # the passes of a copy of the loader are not compared

    def claim(self, name: str, value: str) -> str:
        """Set a fact unless a rank has set it, and return the value that counts; ``value`` if the store fails."""
        found = self.store.ask("compare_set", self._path(name), "", value)
        if found is not None and found.decode(errors="replace") != value:
            return str(found.decode(errors="replace"))
        self._owned(name)
        return value

    def put(self, name: str, value: str) -> bool:
        """Set a value without waiting for an answer; return whether the store took it."""
        return self.store.set(self._owned(name), value)

    def value(self, name: str) -> str | None:
        """Return the value that is set now; None if there is none, where the store's own ``get`` would wait."""
        found = self.store.ask("compare_set", self._path(name), _NEVER, _NEVER)
        text = _NEVER if found is None else str(found.decode(errors="replace"))
        return None if text == _NEVER else text

    def _path(self, name: str) -> str:
        """Return the key of a name. A name that begins with a slash is common to all loaders of these ranks."""
        return f"{self.group}{name}" if name.startswith("/") else f"{self._key}/{name}"

    def _owned(self, name: str) -> str:
        """Return the key of a name, and remember to delete it."""
        if not name.startswith("/"):
            self._keys.add(self._path(name))
        return self._path(name)

    def add(self, name: str, more: int) -> int:
        """Add to a number that all ranks share, and return the sum; 0 if the store fails."""
        found = int(self.store.ask("add", self._path(name), more) or 0)
        if found >= len(self.members):  # the last member deletes it
            self._owned(name)
        return found

    def forget_passes(self, until: int) -> None:
        """Delete the keys that this rank has set for the passes up to a number."""
        while self._forgotten < until:
            self._forgotten += 1
            of_pass = f"{self._key}/{self._forgotten}/"
            for key in [key for key in self._keys if key.startswith(of_pass)]:
                self.store.ask("delete_key", key)
                self._keys.discard(key)

    # ---- the value for all ranks ----

    def hear(self) -> int:
        """Return the number of the latest pass that all ranks have reported as begun; -1 before the first.

        Raises:
            RankMismatchError: A rank has found a mismatch.
        """
        told = self.value("told") or ""
        if told.startswith(_MISMATCH):
            raise RankMismatchError(told.removeprefix(_MISMATCH))
        return int(told) if told.isdecimal() else -1

    def tell(self, told: str | int) -> None:
        """Report a mismatch to all ranks, or the pass that all have begun, unless a mismatch is reported already."""
        said, before = f"{told}" if isinstance(told, int) else _MISMATCH + told, self.value("told") or ""
        while not before.startswith(_MISMATCH):
            found = self.store.ask("compare_set", self._path("told"), before, said)
            if found is None or (now := found.decode(errors="replace")) == said:
                break
            before = now


@atexit.register
def _leave_marks_of_exit() -> None:
    for claims in [*_alive]:
        with suppress(*STORE_ERRORS):  # the process that runs the store may have ended before
            if (store := claims.store.opened()) is not None:
                store.set(claims._path(f"exit/{claims.rank}"), "1")


def _delete_gone() -> None:
    """Delete the keys that this rank has set for loaders that were deleted, except for the last loaders."""
    while len(_gone) > _GONE_KEPT:
        with suppress(IndexError, *STORE_ERRORS):  # another thread took the entry; or the store is gone
            store, keys = _gone.popleft()
            for key in keys if dist.is_initialized() and store() is default_store() else ():
                default_store().delete_key(key)


def agreed_claims(members: Sequence[int], token: str) -> Claims:
    """Return the claims of the ranks that agreed with this rank, which all have the agreement's token."""
    key = f"ddp_patch/p{digest(list(members))[:8]}/{token}"
    return Claims(key, key.rpartition("/")[0], dist.get_rank(), members)


def claims_of_explicit_world(share: int, num_replicas: int, described: Mapping[str, object]) -> Claims | None:
    """Return the claims of the ranks in an explicit world; None if there is no other rank to compare with.

    All ranks of the process group may belong to the world. The n-th loader with equal facts is the same loader on every
    rank.

    Args:
        share: Which share this rank takes.
        num_replicas: How many shares there are.
        described: The loader's facts.

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
    # Count the loader even if the store fails, because the store may fail on this rank alone.
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
    """While entered, allow explicit worlds that only simulate ranks."""
    token = _IS_WATCHED.set(False)
    try:
        yield
    finally:
        _IS_WATCHED.reset(token)
