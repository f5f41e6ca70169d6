"""Claims in the process group's store: the first value that a rank sets for a fact counts. No rank waits.

The store may fail or be gone: a request then has no answer, and training goes on.
"""

import atexit
import warnings
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchWarning, RankMismatchError, WorldError
from ddp_patch.ranks.exchange import digest

# By store: how many loaders with equal facts were patched in an explicit world; and, under an empty text, the number of
# the process group among the groups that had the store.
_patched: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()

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

# The errors of stores that are gone, and of a fake group's store, which cannot be read.
_STORE_ERRORS = (RuntimeError, ValueError)
# Each failure in a row doubles the number of requests that are left out, up to this many doublings: failing may take
# long.
_DOUBLINGS = 10


class Claims:
    """The facts that ranks claim about one loader, in the store of the process group in which the loader was patched.

    A rank claims a value for a fact: the first rank's value counts from then on, and every later rank gets it as the
    answer. So all ranks are compared with one value, and a rank's cost does not grow with their number.

    Args:
        key: The name of the loader in the store: a name of these ranks, the same for all of their loaders, and the
            loader's name among these.
        rank: This process's global rank.
        members: The global ranks that claim.
        read_one_stream: Whether all members shard one stream: a process group may contain several explicit worlds.

    Attributes:
        rank, members, read_one_stream: The arguments.
    """

    def __init__(self, key: str, rank: int, members: Sequence[int], *, read_one_stream: bool = True) -> None:
        self.rank: int = rank
        self.members: Sequence[int] = members
        self.read_one_stream: bool = read_one_stream
        self._key = key
        self._store = ref(default_store())  # a store that is kept alive keeps its port
        self._keys = set[str]()  # all keys that this rank has set
        # How often in a row the store has failed (-1 if it never has), and how many requests are still left out.
        self._failures, self._left_out = -1, 0
        _delete_gone()
        _alive.add(self)
        finalize(self, _gone.append, (self._store, self._keys)).atexit = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # the passes of a copy of the loader are not compared

    # ---- requests ----

    def claim(self, name: str, value: str) -> str:
        """Set a fact unless a rank has set it, and return the value that counts; ``value`` if the store fails."""
        found: str | None = self._ask("compare_set", name, "", value)
        if found not in {None, value}:
            return str(found)
        self._own(name)
        return value

    def put(self, name: str, value: str) -> None:
        """Set a value without waiting for an answer."""
        self._own(name)
        self._ask("set", name, value)

    def value(self, name: str) -> str | None:
        """Return the value that is set now; None if there is none, where the store's own ``get`` would wait."""
        found: str | None = self._ask("compare_set", name, _NEVER, _NEVER)
        return None if found == _NEVER else found

    def add(self, name: str, more: int) -> int:
        """Add to a number that all ranks share, and return the sum; 0 if the store fails."""
        found = int(self._ask("add", name, more) or 0)
        if found == more:  # the first rank deletes it
            self._own(name)
        return found

    @property
    def store(self) -> Any:
        """The process group's store; None if it is gone. A later process group has another one."""
        store = self._store() if dist.is_initialized() else None
        return store if store is not None and store is default_store() else None

    @property
    def is_heard(self) -> bool:
        """Whether the store is there and has not failed lately."""
        return self.store is not None and self._failures <= 0

    def _ask(self, operation: str, name: str, *arguments: Any) -> Any:
        """Return the store's answer, bytes as text; None if the store is gone, fails, or has failed lately."""
        self._left_out = max(0, self._left_out - 1)
        # A value is set in the least time, because steps do so.
        store = self._store() if operation == "set" else self.store
        if store is None or self._left_out > 0:
            return None
        try:
            answer = getattr(store, operation)(self._path(name), *arguments)
        except _STORE_ERRORS as error:
            is_first, self._failures = self._failures < 0, max(self._failures, 0) + 1
            self._left_out = 2 ** min(self._failures, _DOUBLINGS)
            if is_first and self.store is not None:
                warnings.warn(
                    "The ranks cannot compare their passes over a loader now, because the process group's store failed "
                    f"({type(error).__name__}: {error}). They go on, and compare again once it answers, but for "
                    "loaders that were patched with rank= meanwhile. Look for the rank or the network that is gone.",
                    DDPPatchWarning,
                    stacklevel=2,
                )
            return None
        self._failures = min(self._failures, 0)
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def _path(self, name: str) -> str:
        """Return the key of a name. A name that begins with a slash is common to all loaders of these ranks."""
        return f"{self.group}{name}" if name.startswith("/") else f"{self._key}/{name}"

    @property
    def group(self) -> str:
        """The name of these ranks, the same for all of their loaders."""
        return self._key.rpartition("/")[0]

    # ---- keys that are deleted ----

    def _own(self, name: str) -> None:
        """Remember to delete a key, unless it is common to all loaders."""
        if not name.startswith("/"):
            self._keys.add(self._path(name))

    def forget_passes(self, until: int) -> None:
        """Delete the keys that this rank has set for the passes up to a number."""
        for name in [key.removeprefix(f"{self._key}/") for key in self._keys]:
            number = name.partition("/")[0]
            if number.isdecimal() and int(number) <= until:
                self._ask("delete_key", name)
                self._keys.discard(self._path(name))

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
        self._own("told")
        said, before = f"{told}" if isinstance(told, int) else _MISMATCH + told, self.value("told") or ""
        while not before.startswith(_MISMATCH):
            found = self._ask("compare_set", "told", before, said)
            if found in {None, said}:
                break
            before = found


@atexit.register
def _leave_marks_of_exit() -> None:
    for claims in [*_alive]:
        with suppress(*_STORE_ERRORS):  # the process that runs the store may have ended before
            if (store := claims.store) is not None:
                store.set(claims._path(f"exit/{claims.rank}"), "1")


def _delete_gone() -> None:
    """Delete the keys that this rank has set for loaders that were deleted, except for the last loaders."""
    while len(_gone) > _GONE_KEPT:
        with suppress(IndexError, *_STORE_ERRORS):  # another thread took the entry; or the store is gone
            store, keys = _gone.popleft()
            for key in keys if dist.is_initialized() and store() is default_store() else ():
                default_store().delete_key(key)


def agreed_claims(members: Sequence[int], token: str) -> Claims:
    """Return the claims of the ranks that agreed with this rank, which all have the agreement's token."""
    key = f"ddp_patch/p{digest(list(members))[:8]}/{token}"
    return Claims(key, dist.get_rank(), members)


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
    rank, most, counts = dist.get_rank(), ranks // num_replicas, _patched.setdefault(default_store(), Counter())
    # Count the loader even if the store fails, because the store may fail on this rank alone.
    like = f"{num_replicas}/{digest(sorted(described.items()))}"
    counts[like] += 1
    counts[""] = counts[""] or Claims("ddp_patch/", rank, ()).add(f"/given/{rank}", 1)
    if not counts[""]:  # the store fails
        return None
    key = f"ddp_patch/given/{counts['']}/{like}.{counts[like]}"
    claims = Claims(key, rank, range(ranks), read_one_stream=num_replicas == ranks)
    if (takers := claims.add(f"share/{share}", 1)) > most:
        text = (
            f"rank= and num_replicas= contradict the process group: rank {rank} is number {takers} of the ranks that "
            f"take shard {share} of {num_replicas}, and only {most} of the group's {ranks} ranks may, so other samples "
            "would be lost. Leave rank= and num_replicas= out, or pass torch.distributed.get_rank() and "
            "get_world_size(): LOCAL_RANK repeats on every node."
        )
        claims.tell(text)
        raise RankMismatchError(text)
    return claims


@contextmanager
def unwatched() -> Iterator[None]:
    """While entered, allow explicit worlds that only simulate ranks."""
    token = _IS_WATCHED.set(False)
    try:
        yield
    finally:
        _IS_WATCHED.reset(token)
