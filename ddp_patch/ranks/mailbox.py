"""Mailboxes in the process group's store, in which ranks leave each other records, and counts of steps."""

import pickle
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from time import perf_counter, sleep
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import RankMismatchError, WorldError
from ddp_patch.ranks.exchange import digest, ranks_text
from ddp_patch.ranks.histories import PassRecord

__all__ = ["Mailbox", "Peers", "StepCounts", "agreed_peers", "peers_of_explicit_world", "unwatched"]

V = TypeVar("V")

# A rank reads the records of at most this many others. A rank that differs from all others notices that by itself.
_MOST_READ = 32

# Which process group it is of those that had the same store, and how often loaders that look alike were patched in it.
_given: WeakKeyDictionary[Any, tuple[int, Counter[str]]] = WeakKeyDictionary()


# What stores raise that are gone; a fake group's holds nothing that can be read.
_STORE_ERRORS = (RuntimeError, ValueError)

_IS_WATCHED = ContextVar("_IS_WATCHED", default=True)

# What ranks leave each other: which passes they make, how they read, and how far they have come.
_Subject = Literal["passes", "orders", "marks", "steps"]


# The loaders that are gone on this rank, of which the store was not told yet: the store in which ranks compare each,
# its key there, and all ranks that may have it.
_gone: deque[tuple[ref[Any], str, Sequence[int]]] = deque()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Peers:
    """The ranks that exchange records about the same loader, and where.

    Attributes:
        key: Names the loader in the store.
        number: The number by which errors name the loader.
        rank: This process's global rank.
        others: The global ranks whose records are read.
        share: Which share of how many this rank takes, if the user gave it by rank= and num_replicas=.
        most: How many ranks may take one share, then.
    """

    key: str
    number: int
    rank: int
    others: Sequence[int]
    share: tuple[int, int] | None = None
    most: int = 0

    @property
    def read_one_stream(self) -> bool:
        """Whether all shard one stream: a process group may contain several explicit worlds."""
        return self.share is None or self.most == 1

    def require_fair_shares(self, records: Mapping[int, PassRecord]) -> None:
        """Raise RankMismatchError if too many ranks take the share that this one takes."""
        if self.share is None:
            return
        share, num_replicas = self.share
        takers = sorted([self.rank, *(rank for rank, record in records.items() if record.share == share)])
        if len(takers) > self.most:
            raise RankMismatchError(
                f"rank= and num_replicas= contradict the process group: {ranks_text(takers)} all take shard {share} of "
                f"{num_replicas}, and only {self.most} of the group's {dist.get_world_size()} ranks may, so other "
                "samples would be lost. Leave rank= and num_replicas= out, so that they come from the process group, "
                "or pass rank=torch.distributed.get_rank() and num_replicas=torch.distributed.get_world_size(): "
                "LOCAL_RANK repeats on every node."
            )


def agreed_peers(members: Sequence[int], number: int) -> Peers:
    """Return who made an agreement with this rank."""
    return _peers_among(members, f"ddp_patch/passes/{digest(members)}/{number}", number)


def peers_of_explicit_world(share: int, num_replicas: int, described: Mapping[str, object]) -> Peers | None:
    """Return who may share with this rank in an explicit world; None if there is nothing to compare.

    All ranks of the process group may. The n-th loader that looks like this one is the n-th on every rank.

    Args:
        share: Which share this rank takes.
        num_replicas: Of how many.
        described: How the loader looks.

    Raises:
        WorldError: There are more shares than ranks.
        RankMismatchError: Another rank takes the same share.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1 or num_replicas == 1 or not _IS_WATCHED.get():
        return None
    if num_replicas > ranks:
        raise WorldError(
            f"num_replicas={num_replicas} was given in a process group of {ranks} ranks, so no rank would take "
            f"{num_replicas - ranks} of the {num_replicas} shards. Leave rank= and num_replicas= out, so that they "
            "come from the process group, or simulate other worlds without a process group."
        )
    rank, store = dist.get_rank(), default_store()
    try:
        if store not in _given:
            _given[store] = store.add(f"ddp_patch/given/{rank}", 1), Counter()
    except RuntimeError:  # the store is gone
        return None
    group, counts = _given[store]
    base = f"ddp_patch/given/{group}/{num_replicas}/{digest(sorted(described.items()))}"
    counts[base] += 1
    number = counts[base]
    takes = (share, num_replicas), ranks // num_replicas
    peers = _peers_among(range(ranks), f"{base}/{number}", number, *takes)
    mailbox: Mailbox[tuple[object, ...]] = Mailbox(peers, "passes")
    others = mailbox.post_and_read(PassRecord(share=share).plain())
    peers.require_fair_shares({rank: PassRecord.of(left) for rank, left in others.items()})
    return peers


def _peers_among(
    ranks: Sequence[int], key: str, number: int, share: tuple[int, int] | None = None, most: int = 0
) -> Peers:
    """Return whom this rank reads: all of few ranks, of many those that lie evenly behind it."""
    rank = dist.get_rank()
    index = ranks.index(rank)
    others = [*ranks[index + 1 :], *ranks[:index]]
    peers = Peers(key, number, rank, others[:: -(-len(others) // _MOST_READ) or 1], share, most)
    # What they leave is deleted once the loader is gone on all ranks: until then a slower one may read it. Noted here,
    # and told with the next loader: this may run in the middle of anything, such as an import. A script's last loaders
    # may also outlive the store, and torch logs that.
    finalize(peers, _gone.append, (ref(default_store()), key, ranks)).atexit = False
    return peers


@contextmanager
def unwatched() -> Iterator[None]:
    """Allow explicit worlds that only simulate ranks."""
    token = _IS_WATCHED.set(False)
    try:
        yield
    finally:
        _IS_WATCHED.reset(token)


class Mailbox(Generic[V]):
    """What the ranks leave each other about one loader, in the store of the process group in which it was patched.

    Plain values are best: to pickle or read an object of a class takes several times as long.

    Args:
        peers: Who they are.
        subject: What it is about.
    """

    def __init__(self, peers: Peers, subject: _Subject) -> None:
        _tell_gone()
        self._peers = peers  # as long as they are here, what was left stays
        self._own_key = _key(peers.key, subject, peers.rank)
        # No more than a reference: a store that is kept keeps its port, too.
        self._store: ref[Any] | None = ref(default_store())
        self._keys = {rank: _key(peers.key, subject, rank) for rank in peers.others}  # whose turn is first comes first
        self._seen: set[int] = set()
        self._left = b""

    def post_and_read(self, record: V | None, most: int | None = None) -> dict[int, V]:
        """Leave a record, unless it is None or there already, and return what others left. Wait for none.

        Once the process group is gone, or its store, there is nobody to compare with.

        Args:
            record: What to leave.
            most: How many others to read at most, in turn; None for all.
        """
        store = self._open_store()
        if store is None:
            return {}
        try:
            if record is not None and (left := pickle.dumps(record)) != self._left:
                store.set(self._own_key, left)
                self._left = left
            came = self._read(store, most)
        except _STORE_ERRORS:
            self._store = None
            return {}
        return {rank: pickle.loads(left) for rank, left in came.items()}  # noqa: S301 - our own ranks'

    def post_at_once(self, record: V) -> None:
        """Leave a record in the least time: neither the store nor the process group is asked anything."""
        store = None if self._store is None else self._store()
        try:
            if store is not None:
                store.set(self._own_key, pickle.dumps(record))
        except _STORE_ERRORS:
            self._store = None

    @property
    def is_open(self) -> bool:
        """Whether somebody may still leave or read some."""
        return self._open_store() is not None

    def drop(self, rank: int) -> None:
        """Read no more of what a rank leaves."""
        self._keys.pop(rank, None)

    def _open_store(self) -> Any:
        """Return the store, or None if it is gone."""
        if self._store is None or not dist.is_initialized():
            return None
        store = self._store()
        return store if store is default_store() else None

    def _read(self, store: Any, most: int | None) -> dict[int, bytes]:
        now = dict(islice(self._keys.items(), most))
        if most is not None:
            self._keys = {rank: key for rank, key in self._keys.items() if rank not in now} | now
        # A key that is missing would be waited for.
        unseen = [rank for rank in now if rank not in self._seen]
        are_all = bool(unseen) and store.check([now[rank] for rank in unseen])
        self._seen.update(rank for rank in unseen if are_all or store.check([now[rank]]))
        came = [rank for rank in now if rank in self._seen]
        return dict(zip(came, store.multi_get([now[rank] for rank in came]), strict=True)) if came else {}


def _tell_gone() -> None:
    """Tell the store which loaders are gone on this rank; delete what was left about those that are gone on all."""
    if not dist.is_initialized():
        return
    current = default_store()
    with suppress(IndexError, RuntimeError):  # no more, maybe since another thread took it; or the store is gone
        while True:
            store, key, ranks = _gone.popleft()
            if store() is current and current.add(f"{key}/gone", 1) == len(ranks):
                for left in (_key(key, subject, rank) for subject in get_args(_Subject) for rank in ranks):
                    current.delete_key(left)
                current.delete_key(f"{key}/gone")


def _key(key: str, subject: _Subject, rank: int) -> str:
    return f"{key}/{subject}/{rank}"


# Who comes to the end waits at most so long for ranks that may be given more, or for so many steps if these take
# longer: with DDP the others are a step behind at most, but a step may take long to load.
_MOMENT_S, _STEPS, _MOST_S, _AGAIN_S = 1.0, 2, 60.0, 0.002
# The first steps are all told. Later ones may take one part in so many of the time.
_FREE, _TIMES_THEIR_COST = 1000, 100


class _Count(NamedTuple):
    """How many batches a rank was given.

    Attributes:
        epoch: Of which epoch.
        which: Which pass over it, the same on all ranks.
        batches: How many.
        is_over: Whether there are no more.
    """

    epoch: int
    which: str
    batches: int
    is_over: bool

    def may_grow_to(self, mine: "_Count") -> bool:
        """Return whether the rank may still be given as many batches of a pass as this one."""
        return self.epoch < mine.epoch or (self[:2] == mine[:2] and not self.is_over)


class StepCounts:
    """What each rank was given of its latest pass, left in the store in each step, and compared at the end.

    A rank whose stream ends early finds it out only here: the others wait for it in their next collective, and ask for
    nothing more. To leave a count takes no answer of the store's, so no step waits.

    Args:
        peers: The ranks.
        slack: How many batches more one rank may have.

    Attributes:
        due_s: From when on, by ``perf_counter()``, it is worth leaving a count again.
    """

    def __init__(self, peers: Peers, slack: int = 0) -> None:
        self._others, self._slack = peers.others, slack
        self._mailbox: Mailbox[tuple[int, str, int, bool]] = Mailbox(peers, "steps")
        self._epoch, self._which = -1, ""
        self.due_s: float = 0.0
        self._posted = 0
        self._first_s = perf_counter()

    def begin(self, epoch: int, which: str) -> None:
        """Record that a pass begins.

        Args:
            epoch: The epoch.
            which: Which pass over it, the same on all ranks.
        """
        self._epoch, self._which = epoch, which

    def post(self, batches: int) -> None:
        """Leave how many batches this rank was given of the pass, if that is due."""
        now_s = perf_counter()
        if batches == 1:
            self._first_s = now_s
        if now_s < self.due_s:
            return
        self._mailbox.post_at_once((self._epoch, self._which, batches, False))
        self._posted += 1
        if self._posted >= _FREE:
            posted_s = perf_counter()
            self.due_s = posted_s + _TIMES_THEIR_COST * (posted_s - now_s)

    def ranks_given_more(self, batches: int) -> Mapping[int, int]:
        """Return, at the end of the pass, who was given more of it, and how many batches; wait a moment for the others.

        Args:
            batches: How many batches this rank was given.
        """
        mine, now_s = _Count(self._epoch, self._which, batches, is_over=True), perf_counter()
        step_s = (now_s - self._first_s) / max(1, batches - 1)
        until_s = now_s + (min(max(_MOMENT_S, _STEPS * step_s), _MOST_S) if batches > 1 else _MOMENT_S)
        self._mailbox.post_at_once(mine[:])
        while True:
            counts = {rank: _Count(*left) for rank, left in self._mailbox.post_and_read(None).items()}
            alike = {rank: count.batches for rank, count in counts.items() if count[:2] == mine[:2]}
            found = {rank: given for rank, given in alike.items() if given > batches + self._slack}
            is_open = len(counts) < len(self._others) or any(count.may_grow_to(mine) for count in counts.values())
            if found or not is_open or not self._mailbox.is_open or perf_counter() > until_s:
                return found
            sleep(_AGAIN_S)
