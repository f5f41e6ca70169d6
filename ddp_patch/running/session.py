"""Decide what to do with each loader when it is first used, while autopatch is on."""

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.weak import WeakIdKeyDictionary

from ddp_patch.compat.packages import accelerate_is_on, shards_in_accelerate
from ddp_patch.compat.private_torch import RunningLoader
from ddp_patch.errors import DDPPatchError, RankMismatchError, message_of
from ddp_patch.loaders.copying import change_loader
from ddp_patch.loaders.facts import LoaderFacts, look_at
from ddp_patch.loaders.hooks import Use
from ddp_patch.options import Options
from ddp_patch.patching import patch_each
from ddp_patch.ranks.world import World, find_world
from ddp_patch.running.loader_reports import (
    LEFT_ALONE,
    UNKNOWN,
    Patterns,
    UsedLoader,
    compared,
    is_off,
    shown,
    unpatched,
)
from ddp_patch.sharding.refusals import unit_shared
from ddp_patch.sharding.sampler import EpochSampler

__all__ = ["Session", "as_it_was_if_refused", "is_too_soon", "logger", "user_of"]


logger: logging.Logger = logging.getLogger("ddp_patch.autopatch")


class Session:
    """Decides on loaders while autopatch is on.

    Args:
        where: Which world: the keywords of ``find_world``.
        options: How to shard.
        patterns: Which loaders to patch.
        dry_run: Only report what would be done.

    Attributes:
        records: What was done with each loader that was used, in that order.
        early: The loaders that were iterated when there was no process group yet.
        had_world: Whether there were several ranks at any time.
    """

    def __init__(self, where: Mapping[str, Any], options: Options, patterns: Patterns, *, dry_run: bool) -> None:
        self.patterns = patterns
        self.records: list[UsedLoader] = []
        self.early: set[str] = set()
        self.had_world: bool = False
        self._where, self._options, self._dry_run = where, options, dry_run
        self._known: MutableMapping[DataLoader[Any], UsedLoader] = WeakIdKeyDictionary()
        self._lock = threading.RLock()
        self._process = os.getpid()

    def made(self, loader: DataLoader[Any]) -> None:
        """Note a loader that is being made."""
        if is_off():
            vars(loader)[LEFT_ALONE] = True

    def used(self, loader: DataLoader[Any], use: Use) -> None:
        """Patch a loader that is about to be used for the first time, or leave it as it is."""
        # A process that the script has forked has these hooks, too, but no part in the group.
        if is_off() or os.getpid() != self._process:
            return
        record = self._known.get(loader)
        if record is None:
            with self._lock:
                record = self._known.get(loader) or self._decided(loader, use)
        if record is not None and use is Use.ITERATED:
            record.count_pass()

    def has_patched(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader was patched here."""
        record = self._known.get(loader)
        return record is not None and record.fate == "patched"

    def _decided(self, loader: DataLoader[Any], use: Use) -> UsedLoader | None:
        """Decide what to do with a loader; None if a later use decides."""
        with unpatched():  # what looking at it iterates
            world = self._world()
            if world is None:
                if use is Use.ITERATED:
                    self.early.add(shown(loader))
                return None
            user = user_of(loader)
            if is_too_soon(loader, user) or (use is Use.MEASURED and accelerate_is_on()):
                return None
            self.had_world = True
            if user is None:
                record = self._done(loader, world, use)
            else:
                by = f"{type(user).__name__}, which holds it"
                record = replace(UsedLoader.of(look_at(loader)), fate="shards itself", note=by)
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

    def _done(self, loader: DataLoader[Any], world: World, use: Use) -> UsedLoader:
        facts = look_at(loader)
        record = UsedLoader.of(facts)
        if facts.sharded_by is not None:
            by = facts.sharded_by
            what = "the script has patched it" if isinstance(by, EpochSampler) else f"{type(by).__name__}"
            return replace(record, fate="shards itself", note=what)
        if (why := self.why_left(facts)) is not None:
            return replace(record, note=why)
        act = self._foreseen if self._dry_run else self._patched
        return act(record, facts, world, use)

    def _patched(self, record: UsedLoader, facts: LoaderFacts[Any], world: World, use: Use) -> UsedLoader:
        """Put its share into the loader itself, so that all references to it have the patched one."""
        with as_it_was_if_refused(facts.loader, record, use):
            shared = unit_shared(facts, self._options.share)  # now, because the loader is another one after it
            nest = compared(facts.loader)
            (patched,) = patch_each("autopatch", {"": facts.loader}, world, lambda: self._options, nest, change_loader)
        record.note_patched("patched", shared, patched)
        return record

    def why_left(self, facts: LoaderFacts[Any]) -> str | None:
        """Return why a loader is left alone; None if it is to be patched."""
        if LEFT_ALONE in vars(facts.loader):
            return "leave_alone() or unpatched()"
        if (why := self.patterns.why_left(facts.loader)) is not None:
            return why
        # A wrapper, which is a loader too, takes its batches from the loader in an attribute.
        name = facts.other_loader_in
        inner = None if name is None else getattr(facts.loader, name, None)
        is_wrapper = isinstance(inner, DataLoader) and inner.dataset is facts.dataset
        return f"its batches come from another loader, in {name!r}" if is_wrapper else None

    def _foreseen(self, record: UsedLoader, facts: LoaderFacts[Any], world: World, use: Use) -> UsedLoader:
        """Return what a patch would do, by patching a copy without the other ranks."""
        alone = replace(world, share_of_rank=None)
        order = "auto" if self._options.order == "leader" else self._options.order
        options = replace(self._options, order=order)
        try:
            (patched,) = patch_each("autopatch", {"": facts.loader}, alone, lambda: options)
        except DDPPatchError as error:
            return replace(record, fate="would be refused", note=message_of(error))
        record.note_patched("would be patched", unit_shared(facts, options.share), patched)
        return record


@contextmanager
def as_it_was_if_refused(
    loader: DataLoader[Any], record: UsedLoader, use: Use, if_they_differ: str = ""
) -> Iterator[None]:
    """Undo what was changed of a loader if it cannot be patched, and say which one it is.

    Args:
        loader: The loader.
        record: What is reported of it.
        use: What the script does with it.
        if_they_differ: A sentence for an error that says that the ranks' loaders differ.
    """
    before = dict(vars(loader))
    try:
        yield
    except Exception as error:
        vars(loader).clear()
        vars(loader).update(before)
        if isinstance(error, DDPPatchError):
            more = f" {if_they_differ}" if if_they_differ and isinstance(error, RankMismatchError) else ""
            error.args = (_told(error, record, use) + more,)
        raise


def is_too_soon(loader: DataLoader[Any], user: object | None) -> bool:
    """Return whether a loader is used in its own constructor, or where a batch of another one is made."""
    return user is loader or isinstance(user, RunningLoader) or get_worker_info() is not None


def user_of(loader: DataLoader[Any]) -> object | None:
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


def _told(error: DDPPatchError, record: UsedLoader, use: Use) -> str:
    """Return the error's text with the loader that it is about, and what to do if that should not be patched."""
    made = "" if record.place == UNKNOWN else f" made at {record.place}"
    pattern = "" if record.place == UNKNOWN else f", or start with python -m ddp_patch run --except '{record.place}'"
    return (
        f"The loader{made} ({record.what}) is {use.value}, and autopatch patches it now, on all ranks: "
        f"{message_of(error)} If it is not to be sharded, because only some ranks use it (as in a validation on rank "
        "0): use it within ddp_patch.unpatched(), or call ddp_patch.leave_alone(loader) right after it is "
        f"made{pattern}."
    )
