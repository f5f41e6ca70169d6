"""Each rank on its shard: patch each loader of a script at its first use, and report what became of it."""

import logging
import os
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, get_worker_info
from torch.utils.weak import WeakIdKeyDictionary

from ddp_patch.compat.private_packages import accelerate_is_on, shards_in_accelerate
from ddp_patch.compat.private_torch import RunningLoader, imported_fsdp
from ddp_patch.errors import AlreadyPatchedError, DDPPatchError, InvalidOptionError, message_of
from ddp_patch.loaders.copying import change_loader
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit, look_at
from ddp_patch.loaders.hooks import Use, from_here, made
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.loaders.samples import length_of
from ddp_patch.options import Options
from ddp_patch.patching import patch_each
from ddp_patch.ranks.world import World, find_world
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.validation import counted

logger: logging.Logger = logging.getLogger("ddp_patch.autopatch")


L = TypeVar("L", bound=DataLoader[Any])

_off: ContextVar[bool] = ContextVar("ddp_patch.unpatched", default=False)
_LEFT_ALONE = "_ddp_patch_left_alone"  # the attribute of a loader to leave alone; a copy of the loader has it, too


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


def note_if_off(loader: DataLoader[Any]) -> None:
    """Note of a loader that is being made whether that is within ``unpatched()``."""
    if is_off():
        vars(loader)[_LEFT_ALONE] = True


def is_left_alone(loader: DataLoader[Any]) -> bool:
    """Return whether a loader was made within ``unpatched()``, or given to ``leave_alone``."""
    return _LEFT_ALONE in vars(loader)


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
    vars(loader)[_LEFT_ALONE] = True
    return loader


def made_at(loader: DataLoader[Any]) -> str:
    """Return where a loader was made, as ``from_here`` shows it."""
    where = made(loader)
    return "an unknown place" if where is None else from_here(where.place)


def _compared(loader: DataLoader[Any]) -> str:
    """Return which loader of the script it is, in words that are the same on every rank, whose folders may differ."""
    if (where := made(loader)) is None:
        return f"a {type(loader).__name__} that was made before autopatch was on"
    place, caller = (each.rpartition(os.sep)[2] for each in (where.place, where.caller))
    return f"{type(loader).__name__} number {where.number} made at {place}, called at {caller}"


def _user_of(loader: DataLoader[Any]) -> object | None:
    """Return what uses a loader for its own purposes, if it is one of these; None if the script does.

    The loader's constructor, before it is finished; an iterator that fetches a batch of another loader, which shares
    what its dataset reads; or a loader of accelerate's around it, which shards by itself.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        user = frame.f_locals.get("self")
        is_constructor = user is loader and frame.f_code.co_name == "__init__"
        if is_constructor or isinstance(user, RunningLoader) or shards_in_accelerate(type(user)):
            return user
    return None


class Patterns:
    """Lines where loaders are made.

    A pattern is matched as a shell matches names, against the end of the path: ``train.py:41``, ``val_*.py``,
    ``*/data/*.py:1?``. Without a line, it means all of a file.

    Args:
        option: What errors and notes call them.
        patterns: The patterns.
    """

    def __init__(self, option: str, patterns: str | Sequence[str] = ()) -> None:
        chosen = [patterns] if isinstance(patterns, str) else list(patterns)
        if not all(isinstance(each, str) and each for each in chosen):
            raise InvalidOptionError(
                f"{option}={chosen!r} names no file. Pass patterns of where loaders are made, as 'train.py:41' or "
                "'val_*.py'."
            )
        self._option = option
        self._matched = dict.fromkeys(chosen, False)

    def __bool__(self) -> bool:
        return bool(self._matched)

    def match(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader was made at one of these lines."""
        where = made(loader)
        place = "" if where is None else where.place.replace(os.sep, "/")
        full = {each: each if ":" in each else f"{each}:*" for each in self._matched}
        found = [each for each in full if fnmatchcase(place, full[each]) or fnmatchcase(place, f"*/{full[each]}")]
        self._matched.update(dict.fromkeys(found, True))
        return bool(found)

    @property
    def notes(self) -> list[str]:
        """What to say of patterns that matched nothing."""
        unused = sorted(each for each, is_matched in self._matched.items() if not is_matched)
        return [f"The pattern {each!r} of {self._option} matched no loader that was used." for each in unused]


@dataclass
class UsedLoader:
    """A loader that was used.

    Attributes:
        place: Where it was made.
        what: What it is.
        fate: What was done with it: it is patched, is left alone, or shards itself.
        note: Why, or what else to report.
        steps: How many steps a rank makes; None if that is not known.
        passes: How often it was iterated.
        told: What the log says of its fate, if that is more than the word.
    """

    place: str
    what: str
    fate: str = "left alone"
    note: str = ""
    steps: int | None = None
    passes: int = 0
    told: str = ""

    @property
    def line(self) -> str:
        """What the log says."""
        return f"{self.place} {self.what}: {self.told or self.fate}" + (f" ({self.note})" if self.note else "")


_WIDTH = 100


class Summary:
    """What is done with a script while autopatch is on; ``str()`` of it says that.

    Attributes:
        records: The loaders that were used in a process group of several ranks, in that order.
    """

    def __init__(self) -> None:
        self.records: list[UsedLoader] = []
        self._process = os.getpid()

    @property
    def lines(self) -> list[str]:
        """What there is to say."""
        return []

    def __str__(self) -> str:
        return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent="    ") for line in self.lines)

    def _is_off(self) -> bool:
        """Return whether a use is no matter: one that is exempt, or in a process that the script has forked."""
        return is_off() or os.getpid() != self._process


def _what_it_is(facts: LoaderFacts[Any]) -> str:
    """Return what a loader is, in words: ``DataLoader, shuffled, 50,000 samples``."""
    n = facts.stream.length if facts.sharded_by is None else None
    length = "" if n is None else f", {counted(n, 'batch' if facts.unit is ShardedUnit.BATCH else 'sample')}"
    source = facts.stream.source
    order = "in order" if type(source) is SequentialSampler else type(source).__name__
    if type(source) is RandomSampler:
        order = "shuffled" if not source.replacement else "drawn with replacement"
    return f"{type(facts.loader).__name__}, {order}{length}"


class EachRank(Summary):
    """Patches each loader when it is first used in a process group of several ranks.

    Args:
        where: Which world: the keywords of ``find_world``.
        options: How to shard.
        only: Which loaders alone to patch.
        excepted: Which loaders to leave alone.
    """

    def __init__(self, where: Mapping[str, Any], options: Options, only: Patterns, excepted: Patterns) -> None:
        super().__init__()
        self._where, self._options = where, options
        self._only, self._excepted = only, excepted
        self._early: set[str] = set()  # the loaders that were iterated when there was no process group yet
        self._had_world = self._has_wrapper = False
        self._known: MutableMapping[DataLoader[Any], UsedLoader] = WeakIdKeyDictionary()
        self._lock = threading.RLock()

    def used(self, loader: DataLoader[Any], use: Use) -> None:
        """Patch a loader that is about to be used for the first time, or leave it as it is."""
        if self._is_off():
            return
        with self._lock:
            record = self._known.get(loader) or self._decided(loader, use)
            if record is not None and use is Use.ITERATED:
                record.passes += 1

    def wrapped(self, name: str) -> None:
        """Note a model that averages gradients by itself."""
        self._has_wrapper = True

    @property
    def lines(self) -> list[str]:
        """What there is to say: of each loader, and what else was noticed."""
        if not self._had_world:
            return [
                "No loader was used in a process group of several ranks, so none was patched. A script for one process "
                "makes no group: start it with ddp-patch run -n 8, which trains on 8 ranks as one process."
            ]
        passes = Counter[str]()  # of loaders that a script makes alike in each epoch
        for record in self.records:
            passes[record.line] += record.passes
        found = [f"{text}, {counted(n, 'pass')}" for text, n in passes.items()]
        found += [
            f"The loader made at {place} was iterated when there was no group yet: each rank took all of it."
            for place in sorted(self._early)
        ]
        found += [*self._only.notes, *self._excepted.notes]
        # fully_shard(), of torch 2.6 and newer, gives a model a class of its own that derives from this one.
        derived = getattr(imported_fsdp(), "FSDPModule", None)
        if not self._has_wrapper and (derived is None or not derived.__subclasses__()):
            found.append(
                "No DistributedDataParallel was seen, nor FSDP: unless the script averages gradients by itself, each "
                "rank trains a model of its own."
            )
        return found

    def _decided(self, loader: DataLoader[Any], use: Use) -> UsedLoader | None:
        """Decide what to do with a loader; None if a later use decides."""
        with unpatched():  # what looking at it iterates
            world = self._world()
            if world is None:
                if use is Use.ITERATED:
                    self._early.add(made_at(loader))
                return None
            user = _user_of(loader)
            is_too_soon = user is loader or isinstance(user, RunningLoader) or get_worker_info() is not None
            if is_too_soon or (use is Use.MEASURED and accelerate_is_on()):
                return None
            self._had_world = True
            facts = look_at(loader)
            record = UsedLoader(made_at(loader), _what_it_is(facts))
            record.note = self._why_left_alone(loader, facts, record, user)
            if not record.note:
                self._shard(loader, record, world, use)
                record.fate, record.steps = "patched", length_of(loader, ())
                steps = "unknown steps" if record.steps is None else counted(record.steps, "step")
                record.told = f"{world.num_replicas} ranks x {steps}"
        self._known[loader] = record
        self.records.append(record)
        if world.rank == 0:
            logger.info(record.line)
        return record

    def _world(self) -> World | None:
        """Return the world if it has several ranks."""
        if not self._where and not (dist.is_available() and dist.is_initialized()):
            return None
        world = find_world(**self._where)
        return world if world is not None and world.num_replicas > 1 else None

    def _why_left_alone(
        self, loader: DataLoader[Any], facts: LoaderFacts[Any], record: UsedLoader, user: object | None
    ) -> str:
        """Return why a loader is left alone; nothing if it is to be patched."""
        # Both are asked, so that each pattern is seen to be used.
        is_excepted, is_chosen = self._excepted.match(loader), self._only.match(loader)
        if (by := facts.sharded_by if user is None else user) is not None:
            record.fate = "shards itself"
            return "the script has patched it" if isinstance(by, EpochSampler) else type(by).__name__
        if is_left_alone(loader):
            return "leave_alone() or unpatched()"
        if is_excepted or (self._only and not is_chosen):
            return "--except" if is_excepted else "--only"
        # A wrapper, which is a loader too, takes its batches from the loader in an attribute.
        name = facts.other_loader_in
        inner = None if name is None else getattr(loader, name, None)
        is_around = isinstance(inner, DataLoader) and inner.dataset is facts.dataset
        return f"its batches come from another loader, in {name!r}" if is_around else ""

    def _shard(self, loader: DataLoader[Any], record: UsedLoader, world: World, use: Use) -> None:
        """Put a rank's share into a loader itself, so that all references to it have that.

        If that fails, the loader stays as it was, and the error says which one it is, and how to leave it out.
        """
        before = dict(vars(loader))
        try:
            patch_each("autopatch", {"": loader}, world, lambda: self._options, _compared(loader), change_loader)
        except Exception as error:
            vars(loader).clear()
            vars(loader).update(before)
            if isinstance(error, DDPPatchError):
                error.args = (
                    f"The loader made at {record.place} ({record.what}) is {use.value}, and autopatch patches it now, "
                    f"on all ranks: {message_of(error)} If it is not to be sharded, because only some ranks use it (as "
                    "in a validation on rank 0): use it within ddp_patch.unpatched(), call "
                    "ddp_patch.leave_alone(loader) right after it is made, or start with python -m ddp_patch run "
                    f"--except '{record.place}'.",
                )
            raise
