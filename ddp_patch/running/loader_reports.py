"""What is known of each loader that a script makes: where it was made, what was done, what is exempt."""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, TypeVar

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from ddp_patch.errors import AlreadyPatchedError, DDPPatchError, InvalidOptionError
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.loaders.hooks import Made, from_here, made
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.loaders.samples import length_of
from ddp_patch.plan import Plan, Schedule
from ddp_patch.sharding.batches import batches_of, patched_sampler
from ddp_patch.sharding.sampler import EpochSampler

__all__ = [
    "LEFT_ALONE",
    "UNKNOWN",
    "Patterns",
    "UsedLoader",
    "compared",
    "counted",
    "is_off",
    "leave_alone",
    "shown",
    "unpatched",
]


L = TypeVar("L", bound=DataLoader[Any])

_off: ContextVar[bool] = ContextVar("ddp_patch.unpatched", default=False)
LEFT_ALONE = "_ddp_patch_left_alone"  # the attribute of a loader to leave alone; a copy of the loader has it, too


@contextmanager
def unpatched() -> Iterator[None]:
    """Keep ``autopatch`` from patching loaders that are used or made inside: a context manager and decorator.

    A loader that is made inside is not patched later either. A loader that was patched before stays patched. It applies
    to this thread. Without ``autopatch``, it does nothing.

    Examples:
        >>> from ddp_patch import autopatch
        >>> loader = DataLoader(range(4))
        >>> with autopatch(rank=0, num_replicas=2), unpatched():
        ...     len(loader)
        4
    """
    before = _off.set(True)
    try:
        yield
    finally:
        _off.reset(before)


def is_off() -> bool:
    """Return whether this runs within ``unpatched()``, or within this package's own calls."""
    return _off.get()


def leave_alone(loader: L) -> L:
    """Keep ``autopatch`` from ever patching one loader, such as that of a validation on rank 0 only.

    Args:
        loader: A loader that was not used yet.

    Returns:
        The same loader.

    Raises:
        NotALoaderError: ``loader`` is not a DataLoader.
        AlreadyPatchedError: The loader was patched before.

    Examples:
        >>> from ddp_patch import autopatch
        >>> train, val = DataLoader(range(4)), leave_alone(DataLoader(range(4)))
        >>> with autopatch(rank=0, num_replicas=2):
        ...     len(train), len(val)
        (2, 4)
    """
    require_loader("leave_alone", loader, wrappers=False)
    if isinstance(found := sharded_by(loader), EpochSampler):
        raise AlreadyPatchedError(
            f"leave_alone was given a {type(loader).__name__} that gives rank {found.rank} of {found.num_replicas} its "
            "share already: it was patched when it was first used, or before. Call leave_alone(loader) right after it "
            "is made."
        )
    vars(loader)[LEFT_ALONE] = True
    return loader


UNKNOWN = "an unknown place"


def shown(loader: DataLoader[Any]) -> str:
    """Return where a loader was made, as ``from_here`` shows it."""
    where = made(loader)
    return UNKNOWN if where is None else from_here(where.place)


def compared(loader: DataLoader[Any]) -> str:
    """Return which loader of the script it is, in words that are the same on every rank, whose folders may differ."""
    where = made(loader)
    kind = type(loader).__name__
    if where is None:
        return f"a {kind} that was made before autopatch was on"
    place, caller = (each.rpartition(os.sep)[2] for each in (where.place, where.caller))
    return f"{kind} number {where.number} made at {place}, called at {caller}"


@dataclass
class Patterns:
    """Which loaders to patch, by patterns of the lines where they were made.

    A pattern is matched as a shell matches names, against the end of the path: ``train.py:41``, ``val_*.py``,
    ``*/data/*.py:1?``. Without a line, it means all of a file.

    Args:
        only: Patch these alone; all, where there are none.
        excepted: Leave these alone.

    Attributes:
        unused: Those that matched nothing yet.
    """

    only: Sequence[str] = ()
    excepted: Sequence[str] = ()
    unused: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.only, self.excepted = _listed("only", self.only), _listed("excepted", self.excepted)
        self.unused = {*self.only, *self.excepted}

    def why_left(self, loader: DataLoader[Any]) -> str | None:
        """Return the option that leaves a loader alone; None if it is to be patched."""
        where = made(loader)
        # Both are looked through whole, so that each pattern is seen to be used.
        excepted, chosen = ([self._matches(where, pattern) for pattern in each] for each in (self.excepted, self.only))
        if any(excepted):
            return "--except"
        return "--only" if self.only and not any(chosen) else None

    def matches(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader is made at one of the lines of ``only``."""
        where = made(loader)
        # Each is looked at, so that each is seen to be used.
        return any([self._matches(where, pattern) for pattern in self.only])  # noqa: C419 - as said

    def notes(self, option: str = "") -> list[str]:
        """Return what to say of patterns that matched nothing; the option is named if they are not of autopatch's."""
        return [f"The pattern {each!r}{option} matched no loader that was used." for each in sorted(self.unused)]

    def _matches(self, where: Made | None, pattern: str) -> bool:
        if where is None:
            return False
        full = pattern if ":" in pattern else f"{pattern}:*"
        place = where.place.replace(os.sep, "/")
        if fnmatchcase(place, full) or fnmatchcase(place, f"*/{full}"):
            self.unused.discard(pattern)
            return True
        return False


def _listed(name: str, patterns: str | Sequence[str]) -> Sequence[str]:
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in listed:
        if not isinstance(pattern, str) or not pattern:
            raise InvalidOptionError(
                f"{name}={patterns!r} names no file. Pass patterns of where loaders are made, as 'train.py:41' or "
                "'val_*.py'."
            )
    return listed


Fate: TypeAlias = Literal[
    "patched",
    "would be patched",
    "would be refused",
    "left alone",
    "shards itself",
    "divided",
    "whole",
    "whole and divided",
]


@dataclass
class UsedLoader:
    """A loader that was used.

    Attributes:
        place: Where it was made.
        what: What it is.
        fate: What was done with it.
        note: Why, or what else to report.
        samples: How many items a rank gets in a pass, in words.
        padding: How many items of a pass are repeated over all ranks, or left out, in words.
        steps: How many steps a rank makes; None if that is not known.
        ranks: How many ranks share.
        passes: How often it was iterated.
        loader: The loader, if it was patched and still lives.
    """

    place: str
    what: str
    fate: Fate
    note: str = ""
    samples: str = ""
    padding: str = ""
    steps: int | None = None
    ranks: int = 1
    passes: int = 0
    loader: "weakref.ref[DataLoader[Any]] | None" = None

    @classmethod
    def of(cls, facts: LoaderFacts[Any]) -> "UsedLoader":
        """Return what is known of a loader with which nothing was done."""
        return cls(shown(facts.loader), _what_it_is(facts), "left alone")

    def count_pass(self) -> None:
        """Note that it is iterated once more."""
        self.note_pass()
        self.passes += 1

    def note_pass(self) -> None:
        """Fill in what its latest pass has shown of a loader without a length, if that came to its end."""
        loader = None if self.loader is None else self.loader()
        schedule = None if loader is None or self.samples else _schedule_of_latest(loader)
        if schedule is not None:
            lengths = [part.length or 0 for part in schedule.parts]
            self.steps = schedule.count
            self._note_shares(schedule.plan, lengths, "sample" if schedule.batching.size > 1 else "item")

    def note_patched(self, fate: Fate, facts: LoaderFacts[Any], patched: DataLoader[Any]) -> None:
        """Fill in what a rank gets of the patched loader."""
        sampler, n = patched_sampler("autopatch", patched), facts.stream.length
        self.fate = fate
        self.steps, self.ranks, self.loader = length_of(patched, ()), sampler.num_replicas, weakref.ref(patched)
        if sampler.agreed.options.divides_batches:
            self.samples = "a part of each batch"
        elif n is not None and (facts.unit is not ShardedUnit.ITERABLE or facts.num_workers < 2):  # else by worker
            self._note_shares(sampler.rank_passes.plan, [n], _unit(facts))
        if sampler.agreed.leader is not None:
            self.note = "rank 0 draws for all"

    def note_whole(self, fate: Fate, patched: DataLoader[Any], facts: LoaderFacts[Any]) -> None:
        """Fill in what a rank gets of a loader that is whole on every rank."""
        self.fate, self.steps = fate, length_of(patched, ())
        if fate == "whole" and facts.stream.length is not None:
            self.samples = counted(facts.stream.length, _unit(facts))

    def _note_shares(self, plan: Plan, lengths: Sequence[int], unit: str) -> None:
        """Fill in what a rank gets of streams of these lengths."""
        self.samples = counted(sum(len(plan.share(n)) for n in lengths), unit)
        more = sum(plan.total(n) - n for n in lengths)
        self.padding = f"{abs(more):,} {'left out' if more < 0 else 'repeated'}" if more else ""

    @property
    def line(self) -> str:
        """What the log says."""
        steps = "unknown steps" if self.steps is None else counted(self.steps, "step")
        share = f"{self.ranks} ranks x {steps}"
        told = {
            "patched": share,
            "would be patched": f"would be {share}",
            "divided": f"each batch divided over {counted(self.ranks, 'rank')}, {steps}",
            "whole": f"whole on every rank, {steps}",
            "whole and divided": f"whole under no_grad, else divided over {counted(self.ranks, 'rank')}, {steps}",
        }.get(self.fate, self.fate)
        return f"{self.place} {self.what}: {told}" + (f" ({self.note})" if self.note else "")

    @property
    def summary(self) -> str:
        """What the summary says beside the passes."""
        return "; ".join(filter(None, (self.line, self.samples and f"{self.samples} a rank", self.padding)))


def _unit(facts: LoaderFacts[Any]) -> str:
    return "batch" if facts.unit is ShardedUnit.BATCH else "sample"


def _what_it_is(facts: LoaderFacts[Any]) -> str:
    """Return what a loader is, in words: ``DataLoader, shuffled, 50,000 samples``."""
    n = facts.stream.length if facts.sharded_by is None else None
    length = "" if n is None else f", {counted(n, _unit(facts))}"
    source = facts.stream.source
    order = "in order" if type(source) is SequentialSampler else type(source).__name__
    if type(source) is RandomSampler:
        order = "shuffled" if not source.replacement else "drawn with replacement"
    return f"{type(facts.loader).__name__}, {order}{length}"


def counted(number: int, unit: str) -> str:
    """Return a number of things, in words."""
    plural = {"batch": "batches", "pass": "passes"}.get(unit, f"{unit}s")
    return f"{number:,} {unit if number == 1 else plural}"


def _schedule_of_latest(loader: DataLoader[Any]) -> Schedule | None:
    """Return the batches of a loader's latest pass, if it came to its end."""
    try:
        batches = batches_of("autopatch", loader)
    except DDPPatchError:
        return None
    latest, options = batches.passes.latest, batches.passes.agreed.options
    # A rank may get other items than it reads.
    if latest is None or options.divides_batches or options.by_worker:
        return None
    return latest.whole_schedule(batches)
