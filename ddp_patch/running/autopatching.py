"""Patch every loader of a script or framework at its first use, and report the fate of each loader."""

import functools
import logging
import os
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar, Unpack
from unittest.mock import patch

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, get_worker_info
from torch.utils.weak import WeakIdKeyDictionary

from ddp_patch.compat.private_packages import (
    ACCELERATE_TAKES_LOADERS,
    TAKE_LOADERS,
    accelerate_is_on,
    shards_in_accelerate,
)
from ddp_patch.compat.private_torch import RunningLoader, imported_fsdp
from ddp_patch.errors import AlreadyPatchedError, DDPPatchError, InvalidOptionError, message_of
from ddp_patch.loaders.copying import change_loader
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit, look_at
from ddp_patch.loaders.hooks import Use, about_to_use, called_before, from_here, made, places_recorded, told_of_uses
from ddp_patch.loaders.nested_samplers import length_of
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.options import Options
from ddp_patch.patching import PatchOptions, patch_each
from ddp_patch.ranks.world import World, find_world
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.validation import counted
from ddp_patch.wrappers import split_options

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


# What follows from training as one process.
_DECIDED = {"share", "uneven", "rank", "num_replicas", "process_group", "device_mesh"}


@contextmanager
def autopatch(
    *,
    only: str | Sequence[str] = (),
    excepted: str | Sequence[str] = (),
    as_one_process: bool = False,
    **options: Unpack[PatchOptions],
) -> Iterator["Summary"]:
    """Patch every loader when the script first uses it: a context manager and decorator.

    The first use is to iterate the loader, to call ``len()`` on it, or to pass it to a function of this package. If
    there is a process group of several ranks then, and the loader is not sharded yet, the loader itself is patched, and
    stays so. All ranks have to use it, at the same point of the script. Nothing is printed; on rank 0, the logger
    ``ddp_patch.autopatch`` reports each loader at INFO.

    With ``as_one_process=True``, the ranks train the model that one process trains, as ``ddp-patch run -n`` does: every
    rank has whole batches, and calls of models are divided. Make models and optimizers inside, with the same random
    seeds on every rank.

    Args:
        only: Patch only loaders that were made at lines that match, such as ``"train.py:41"`` or ``"data/*.py"``.
        excepted: Do not patch loaders that were made at lines that match.
        as_one_process: Whether the ranks train as one process. There need not be a process group: one is made of the
            ranks that a launcher has started.
        options: The keywords of ``patch_dataloader_to_ddp``, for all loaders.

    Yields:
        What was done with each loader so far; ``str()`` of it is a table.

    Raises:
        InvalidOptionError: An option has a value that it does not take.
        MissingRanksError: From the use of a loader: some ranks did not use it. As one process: also from
            ``backward()``.
        RankMismatchError: As one process: the ranks no longer do the same, or no longer train the same model.
        DDPPatchError: From the use of a loader: whatever ``patch_dataloader_to_ddp`` raises.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> with autopatch(rank=1, num_replicas=2):
        ...     [batch.tolist() for batch in loader]
        [[1, 3], [5, 7], [9]]
    """
    chosen_by_line = {name for name, lines in (("only", only), ("excepted", excepted)) if lines}
    if as_one_process and (given := (_DECIDED & options.keys()) | chosen_by_line):
        raise InvalidOptionError(
            f"autopatch was given as_one_process=True and {', '.join(sorted(given))}: as one process, all ranks of the "
            "launcher have whole batches, and no loader is sharded. Leave these options out, or as_one_process."
        )
    where, chosen = split_options("autopatch", options, PatchOptions)
    session: Summary = EachRank(where, Options(**chosen), {"only": only}, {"excepted": excepted})
    if as_one_process:
        from ddp_patch.running.one_process import OneProcess  # which imports this module

        session = OneProcess(Options(**chosen))
    with session.running():
        yield session


_WIDTH = 100


class Summary:
    """The report of a run; ``str()`` of it is a table.

    Attributes:
        records: The loaders that were used in a process group of several ranks, in that order.
    """

    def __init__(self) -> None:
        self.records: list[UsedLoader] = []
        self._process = os.getpid()

    @property
    def lines(self) -> list[str]:
        """The lines of the report."""
        return []

    def __str__(self) -> str:
        return "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent="    ") for line in self.lines)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hook loaders and models, while entered."""

        def registered(model: nn.Module, name: str, part: nn.Module | None) -> None:
            """Tell of a ``DistributedDataParallel`` or an FSDP model that is made: it registers the one it wraps."""
            fsdp = getattr(imported_fsdp(), "FullyShardedDataParallel", DistributedDataParallel)
            if isinstance(model, DistributedDataParallel | fsdp):
                self.wrapped(type(model).__name__)

        with ExitStack() as stack:
            stack.callback(register_module_module_registration_hook(registered).remove)
            stack.enter_context(places_recorded())
            stack.enter_context(called_before("__init__", _note_if_off))
            self.hook(stack)
            yield

    def hook(self, stack: ExitStack) -> None:
        """Add hooks, until the stack closes."""

    def wrapped(self, name: str) -> None:
        """Note a model that averages its gradients."""

    def _is_off(self) -> bool:
        """Return whether to ignore a use: within ``unpatched()``, or in a forked process."""
        return is_off() or os.getpid() != self._process


def _note_if_off(loader: DataLoader[Any]) -> None:
    """Mark a loader that is made within ``unpatched()``."""
    if is_off():
        vars(loader)[_LEFT_ALONE] = True


@dataclass
class UsedLoader:
    """A loader that was used.

    Attributes:
        place: The line where it was made.
        what: Its class, order and length.
        fate: "patched", "left alone" or "shards itself".
        note: The reason, if it was not patched.
        passes: How often it was iterated.
        told: Ranks and steps, if it was patched.
    """

    place: str
    what: str
    fate: str = "left alone"
    note: str = ""
    passes: int = 0
    told: str = ""

    @property
    def line(self) -> str:
        """The line of the log."""
        return f"{self.place} {self.what}: {self.told or self.fate}" + (f" ({self.note})" if self.note else "")


class EachRank(Summary):
    """Patches each loader when it is first used in a process group of several ranks.

    Args:
        where: Which world: the keywords of ``find_world``.
        options: How to shard.
        only: Patterns of lines where loaders are made that are patched alone, by the option's name. As a shell matches
            names, each is matched against the end of the path: ``train.py:41``, ``val_*.py``, ``*/data/*.py:1?``.
        excepted: Such patterns, of loaders to leave alone.
    """

    def __init__(
        self,
        where: Mapping[str, Any],
        options: Options,
        only: Mapping[str, str | Sequence[str]],
        excepted: Mapping[str, str | Sequence[str]],
    ) -> None:
        super().__init__()
        self._where, self._options = where, options
        self._only, self._excepted = _patterns(only), _patterns(excepted)
        self._early: set[str] = set()  # the loaders that were iterated when there was no process group yet
        self._had_world = self._has_wrapper = False
        self._known: MutableMapping[DataLoader[Any], UsedLoader] = WeakIdKeyDictionary()
        self._lock = threading.RLock()

    def hook(self, stack: ExitStack) -> None:
        """Hook uses of loaders, until the stack closes."""
        find = _frameworks_found(self.used, stack)
        find(None)
        stack.enter_context(called_before("__init__", find))  # imported by now, if the script uses them
        stack.enter_context(told_of_uses(self.used))
        stack.enter_context(called_before("__iter__", partial(about_to_use, use=Use.ITERATED)))
        stack.enter_context(called_before("__len__", partial(about_to_use, use=Use.MEASURED)))

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
        """The lines of the report: loaders, patterns, and models without DDP."""
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
        found += [
            f"The pattern {each!r} of {option} matched no loader that was used."
            for (option, each), is_matched in sorted({**self._only, **self._excepted}.items())
            if not is_matched
        ]
        # fully_shard(), of torch 2.6 and newer, gives a model a class of its own that derives from this one.
        derived = getattr(imported_fsdp(), "FSDPModule", None)
        if not self._has_wrapper and (derived is None or not derived.__subclasses__()):
            found.append(
                "No DistributedDataParallel was seen, nor FSDP: unless the script averages gradients by itself, each "
                "rank trains a model of its own."
            )
        return found

    def _decided(self, loader: DataLoader[Any], use: Use) -> UsedLoader | None:
        """Decide the fate of a loader; None if a later use decides."""
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
                steps, record.fate = length_of(loader, ()), "patched"
                told = "unknown steps" if steps is None else counted(steps, "step")
                record.told = f"{world.num_replicas} ranks x {told}"
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
        is_excepted, is_chosen = _matches(self._excepted, loader), _matches(self._only, loader)
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
        """Change the loader itself to this rank's share, so that all references to it are patched.

        If that fails, the loader stays as it was, and the error names it and says how to leave it out.
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


# ---- which loader it is ----


def made_at(loader: DataLoader[Any]) -> str:
    """Return where a loader was made, as ``from_here`` shows it."""
    where = made(loader)
    return "an unknown place" if where is None else from_here(where.place)


def _compared(loader: DataLoader[Any]) -> str:
    """Return words that identify a loader on all ranks, even if their folders differ."""
    if (where := made(loader)) is None:
        return f"a {type(loader).__name__} that was made before autopatch was on"
    place, caller = (each.rpartition(os.sep)[2] for each in (where.place, where.caller))
    return f"{type(loader).__name__} number {where.number} made at {place}, called at {caller}"


def _what_it_is(facts: LoaderFacts[Any]) -> str:
    """Return a loader's class, order and length: ``DataLoader, shuffled, 50,000 samples``."""
    n = facts.stream.length if facts.sharded_by is None else None
    length = "" if n is None else f", {counted(n, 'batch' if facts.unit is ShardedUnit.BATCH else 'sample')}"
    source = facts.stream.source
    order = "in order" if type(source) is SequentialSampler else type(source).__name__
    if type(source) is RandomSampler:
        order = "shuffled" if not source.replacement else "drawn with replacement"
    return f"{type(facts.loader).__name__}, {order}{length}"


def _user_of(loader: DataLoader[Any]) -> object | None:
    """Return the object that uses a loader, if this is not the script; None if it is.

    The object may be the loader in its own constructor; an iterator that reads a batch of another loader; or a loader
    of accelerate around this one, which shards by itself.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        user = frame.f_locals.get("self")
        is_constructor = user is loader and frame.f_code.co_name == "__init__"
        if is_constructor or isinstance(user, RunningLoader) or shards_in_accelerate(type(user)):
            return user
    return None


# Whether a pattern has matched a loader, by the option's name and the pattern.
_Patterns = dict[tuple[str, str], bool]


def _patterns(given: Mapping[str, str | Sequence[str]]) -> _Patterns:
    """Return the patterns of an option.

    Raises:
        InvalidOptionError: One is no pattern.
    """
    ((option, patterns),) = given.items()
    chosen = [patterns] if isinstance(patterns, str) else list(patterns)
    if not all(isinstance(each, str) and each for each in chosen):
        raise InvalidOptionError(
            f"{option}={chosen!r} names no file. Pass patterns of where loaders are made, as 'train.py:41' or "
            "'val_*.py'."
        )
    return dict.fromkeys(((option, each) for each in chosen), False)


def _matches(patterns: _Patterns, loader: DataLoader[Any]) -> bool:
    """Return whether a loader was made at one of these lines, and note which patterns match."""
    where = made(loader)
    place = "" if where is None else where.place.replace(os.sep, "/")
    full = {key: key[1] if ":" in key[1] else f"{key[1]}:*" for key in patterns}
    found = [key for key, each in full.items() if fnmatchcase(place, each) or fnmatchcase(place, f"*/{each}")]
    patterns.update(dict.fromkeys(found, True))
    return bool(found)


# ---- what frameworks take ----


def _frameworks_found(used: Callable[[DataLoader[Any], Use], object], stack: ExitStack) -> Callable[[object], None]:
    """Return what takes hold of the frameworks that were imported since, until the stack closes.

    Lightning would replace the loader's sampler, so the loader is patched before. accelerate shards all loaders
    correctly except those with a batch sampler that is not torch's own, so only these are patched before. The rest is
    left to accelerate, and to any framework that returns a loader which shards itself.

    Args:
        used: Called with a loader that is about to be used, and how.
        stack: Closes when they see no more.
    """
    missing = {*TAKE_LOADERS, ACCELERATE_TAKES_LOADERS}

    def find(_loader: object) -> None:
        for place in [place for place in missing if place[0] in sys.modules]:
            module, kind, method = place
            owner = getattr(sys.modules[module], kind, None)
            if owner is not None:  # else it is being imported
                missing.remove(place)
                around = _for_accelerate if place == ACCELERATE_TAKES_LOADERS else _patching_first
                stack.enter_context(patch.object(owner, method, around(getattr(owner, method), used)))

    return find


def _patching_first(take: Any, used: Callable[[DataLoader[Any], Use], object]) -> Any:
    @functools.wraps(take)
    def taking(*args: Any, **options: Any) -> Any:
        for given in (*args, *options.values()):
            if isinstance(given, DataLoader):
                used(given, Use.HANDED)
        return take(*args, **options)

    return taking


def _for_accelerate(take: Any, used: Callable[[DataLoader[Any], Use], object]) -> Any:
    @functools.wraps(take)
    def taking(accelerator: Any, data_loader: Any, *args: Any, **options: Any) -> Any:
        if issubclass(type(data_loader), DataLoader) and not is_off():
            facts = look_at(data_loader)
            # accelerate would split a batch sampler's batches, or lose some.
            if facts.sharded_by is None and facts.unit is ShardedUnit.BATCH:
                used(data_loader, Use.HANDED)
            by = sharded_by(data_loader)
            if isinstance(by, EpochSampler) and by.num_replicas == accelerator.num_processes:  # not as one process
                from ddp_patch.integrations.accelerate import prepare_patched

                return prepare_patched(accelerator, data_loader)
        return take(accelerator, data_loader, *args, **options)

    return taking
