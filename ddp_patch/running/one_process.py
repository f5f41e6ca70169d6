"""Run a script of one process on several ranks as one: its batches are divided, its gradients averaged.

A loader has two forms. Every rank takes all of it from a copy; or a part of each of its batches from the loader itself.
A pass begins whole, and shows by ``backward()`` after its first batch whether it trains: then it goes on divided.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, NoReturn
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from ddp_patch.compat.private_torch import AroundIterator, forget_iterator
from ddp_patch.errors import DDPPatchError, WorldError
from ddp_patch.evaluation.steps import steps_of
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import ShardedUnit
from ddp_patch.loaders.hooks import Use, called_before
from ddp_patch.loaders.samples import length_of
from ddp_patch.options import Options
from ddp_patch.orders.random_states import GlobalState, loader_seed
from ddp_patch.ranks.exchange import digest
from ddp_patch.ranks.world import World, find_world
from ddp_patch.resume import loader_state, resume_loader
from ddp_patch.running.gradients import Gradients, PassWeights
from ddp_patch.running.launch import backend_here, group_made, is_started, told
from ddp_patch.running.loader_reports import (
    NOT_DIVIDED,
    Patterns,
    Summary,
    UsedLoader,
    is_too_soon,
    logger,
    unpatched,
    user_of,
)
from ddp_patch.running.lockstep import Lockstep, RandomNumbers, Replicas, seed_all
from ddp_patch.running.overlay import shadowed
from ddp_patch.sharding.batches import patched_facts, patched_sampler
from ddp_patch.sharding.saved_state import epoch_after
from ddp_patch.validation import counted

__all__ = ["OneProcess"]


# What only a script calls that has ranks of its own.
_OF_RANKS = {"spawn": torch.multiprocessing, "start_processes": torch.multiprocessing, "init_process_group": dist}


@dataclass(eq=False)
class _Loader:
    """What is known of a loader of the script.

    Attributes:
        record: What is reported of it: if it has a note, the loader is never divided, and why.
        whole: A copy that gives every rank all of it; None if the loader is left as it is.
        seed: What its order follows from.
        is_stream: Whether its dataset is iterable, so that it cannot be read twice.
        is_even: Whether all parts of all its batches have equally many samples, as far as that is known.
        trains_at: Where passes began, by their call stacks, in which ``backward()`` was called for its batches.
        weights: Those of its latest divided pass.
    """

    record: UsedLoader
    whole: Any
    seed: int
    is_stream: bool
    is_even: bool = False
    trains_at: set[int] = field(default_factory=set)
    weights: PassWeights | None = None


class OneProcess(Summary):
    """Runs a script as one process, from when it first uses a loader or makes an optimizer.

    Args:
        options: How to shard.
        only: Which loaders alone to divide.
        excepted: Which loaders to leave alone.
        whole: Loaders that are made there are never divided; None for no such place.
        sync_batchnorm: Whether batch normalisation sees the whole batch.
        on_error: Called with what ends the script on this rank, before the others are told.
    """

    _if_they_differ = (
        " In a loop over a divided loader, random numbers differ between the ranks from the first optimizer step on: "
        "make random data outside of such loops, or with a generator of its own."
    )

    def __init__(
        self,
        options: Options,
        only: Patterns,
        excepted: Patterns,
        whole: Patterns | None = None,
        *,
        sync_batchnorm: bool = False,
        on_error: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        super().__init__(options, only, excepted)
        self._never, self._sync_batchnorm, self._on_error = whole or Patterns("--whole"), sync_batchnorm, on_error
        # What is known of a loader holds copies of it, with its data, so it goes with the loader.
        self._known: MutableMapping[DataLoader[Any], _Loader] = WeakIdKeyDictionary()
        self._stack = ExitStack()
        self._told: set[str] = set()
        self._seed = 0
        self._has_begun = False
        # By how often backward() was called before: which loaders gave a batch; now, and before the latest call.
        self._given: tuple[int, WeakSet[_Loader]] = (0, WeakSet())
        self._given_before: WeakSet[_Loader] = WeakSet()
        self._running: list[_Loader] = []  # the loaders of passes that train
        self._world = World(0, 1)
        self._lockstep = Lockstep(self._tell)
        self._replicas = Replicas(self._lockstep, self._tell)
        self._numbers = RandomNumbers()
        self._gradients = Gradients(self._lockstep, self._replicas, self._numbers, self._tell)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook optimizers, passes, ``backward()`` and what makes process groups, while entered."""
        make = Optimizer.__init__

        def made(optimizer: Any, *args: Any, **options: Any) -> None:
            make(optimizer, *args, **options)
            if os.getpid() == self._process:
                self._begin()
                self._replicas.add(optimizer, sync_batchnorm=self._sync_batchnorm)

        with self._stack as stack, patch.object(Optimizer, "__init__", made):
            stack.callback(self._numbers.end)
            for name, module in _OF_RANKS.items():
                refusing = partial(self._refuse_unless_alone, name, getattr(module, name))
                stack.enter_context(patch.object(module, name, refusing))
            stack.enter_context(called_before("__iter__", self._iterated))
            if not is_started():  # else they are alike already, and the script may yet seed them
                self._begin()
            try:
                yield
            except BaseException as error:
                if isinstance(error, SystemExit) and not error.code:
                    self._finish()
                    raise
                self._explain(error)
                self._on_error(error)
                raise
            else:
                self._finish()

    def _refuse_unless_alone(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Refuse a function that is for ranks of the script's own, if there are ranks already, or it sees none."""
        sees_none = is_started() and name == "init_process_group"
        if (self._ranks > 1 or sees_none) and os.getpid() == self._process:
            self._refuse(f"calls {name}()")
        return function(*args, **options)

    def _refuse(self, does: str) -> NoReturn:
        raise WorldError(
            f"The script {does}, and it runs on {counted(self._ranks, 'rank')} as one process, which needs no ranks, "
            "process group or averaging of its own. Leave that out; or pass --mode ranks, where each rank sees which "
            "one it is, and trains on its shard. A script that starts its ranks itself is started without this command."
        )

    def wrapped(self, name: str) -> None:
        """Refuse a model that averages gradients by itself."""
        if self._lockstep.ranks > 1:
            self._refuse(f"wraps a model in {name}")

    def used(self, loader: DataLoader[Any], use: Use) -> None:
        """Divide a loader that a function of this package or a framework is about to use."""
        if self._has_begun and use in {Use.ASKED, Use.HANDED} and not self._is_off():
            with unpatched():
                known = self._look(loader)
                if known.whole is not None and not known.record.note:
                    self._divide(known, loader)

    def _iterated(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """Return the iterator of a loader's next pass; None if the loader itself makes it."""
        if self._is_off() or user_of(loader) is not None or is_too_soon(loader, None):
            return None
        self._begin()
        with unpatched():  # what looking at it and iterating it iterates
            known = self._look(loader)
            known.record.passes += 1
            if known.whole is None:
                return None
            may_train = torch.is_grad_enabled() and not known.record.note
            place = _call_stack()
            trains = place in known.trains_at or known.is_stream
            is_divided = may_train and trains and not self._replicas.are_evaluated
            if is_divided:
                self._divide(known, loader)
                _go_on_after(known.whole, loader)
            else:
                self._replicas.share_buffers()
                if known.record.fate == "divided":
                    _go_on_after(loader, known.whole)
            may_go_on = may_train and not known.is_stream
            sources = self._sources(known, loader, place, is_divided=is_divided, may_go_on=may_go_on)
            return _Pass(sources, self._lockstep)

    @property
    def _ranks(self) -> int:
        """How many ranks there are, or will be when they are joined."""
        return max(self._lockstep.ranks, int(told("WORLD_SIZE", "1")))

    @property
    def notes(self) -> list[str]:
        """What the summary says beside the table."""
        steps = counted(self._lockstep.steps, "optimizer step")
        found = [f"{counted(self._ranks, 'rank')} trained as one process: {steps}."]
        if self._ranks > 1 and not any(record.fate == "divided" for record in self.records):
            found.append(f"{NOT_DIVIDED}: every rank computed all of each batch, and no time was saved.")
        return [*found, *self._never.notes, *super().notes]

    def _begin(self) -> None:
        """Join the other ranks, once."""
        if self._has_begun:
            return
        self._has_begun = True
        self._seed = (torch.initial_seed() if self._options.seed is None else self._options.seed) % 2**63
        if (dist.get_world_size() if dist.is_initialized() else self._ranks) > 1:
            self._join()
        self._numbers.seed(self._seed, self._lockstep.rank)
        self._stack.enter_context(self._gradients.hooked())
        train = f"{counted(self._lockstep.ranks, 'rank')} {'trains' if self._lockstep.ranks == 1 else 'train'}"
        self._tell(f"{train} as one process; orders and random numbers follow from seed {self._seed}", logging.INFO)

    def _join(self) -> None:
        """Make the process group, if there is none, and let the ranks start alike."""
        timeout = self._options.timeout
        if not dist.is_initialized():
            self._stack.enter_context(group_made(backend_here(), timeout=timedelta(seconds=timeout)))
            self._stack.enter_context(patch.object(dist, "is_initialized", _is_initialized))
        self._lockstep.join(timeout)
        self._world = find_world() or self._world
        home = "" if is_started() or self._lockstep.rank else tempfile.mkdtemp(prefix="ddp_patch-")
        ranks = self._lockstep.gathered((self._seed, torch.initial_seed(), hash("ddp_patch"), home))
        self._seed, of_torch, _, home = ranks[0]
        if len({(seed, of_torch) for seed, of_torch, _, _ in ranks}) > 1:
            self._tell("The ranks were seeded differently: all go on with the seed of rank 0.")
            seed_all(of_torch % 2**63)
        if len({hashed for _, _, hashed, _ in ranks}) > 1:
            self._tell(
                "The ranks hash strings differently, so a set of strings has another order on each. Set "
                "PYTHONHASHSEED=0 before they start."
            )
        if home:  # else the command has done so
            self._stack.enter_context(shadowed(self._lockstep.rank, home))

    def _tell(self, text: str, level: int = logging.WARNING) -> None:
        """Tell the user something, once, on the first rank."""
        if self._lockstep.rank == 0 and text not in self._told:
            self._told.add(text)
            logger.log(level, "%s", text)

    def _look(self, loader: DataLoader[Any]) -> _Loader:
        """Return what is known of a loader."""
        if (known := self._known.get(loader)) is not None:
            return known
        record, facts = self._looked_at(loader)
        seed = loader_seed(self._seed, digest(record.what), len(self.records) + 1)
        known = _Loader(record, None, seed, is_stream=facts.unit is ShardedUnit.ITERABLE)
        if not record.note:
            if loader.batch_sampler is None:
                record.note = "it makes no batches"
            elif self._never.match(loader):
                record.note = "--whole"
            elif loader.batch_size is not None and loader.batch_size < self._lockstep.ranks:
                record.note = f"batches of {loader.batch_size} cannot be divided"
            size, n = loader.batch_size or 1, self._lockstep.ranks
            known.is_even = size % n == 0 and (loader.drop_last or (length_of(loader.sampler, ()) or 1) % size % n == 0)
            known.whole = self._in_world(known, copy_loader(loader), World(0, 1))
            record.note_fate("whole", known.whole, "whole on every rank,")
        self.records.append(record)
        self._known[loader] = known
        return known

    # ---- the two forms of a loader ----

    def _in_world(self, known: _Loader, loader: DataLoader[Any], world: World) -> DataLoader[Any]:
        """Put the part of each batch that is a rank's of a world into a loader, and return it."""
        options = replace(self._options, share="within_batches", uneven="keep", seed=known.seed)
        if world.num_replicas == 1:
            options = replace(options, order="auto", cost=None)
            if known.is_stream or loader.batch_sampler is None:
                options = replace(options, share="auto", uneven="pad")
        self._shard(loader, known.record, world, options, Use.ITERATED)
        return loader

    def _divide(self, known: _Loader, loader: DataLoader[Any]) -> None:
        """Put this rank's part of each batch into the loader itself, so that all references to it have that."""
        self._replicas.meet("begins to iterate a loader that is divided")
        if known.record.fate != "divided":
            self._in_world(known, loader, self._world)
            ranks = counted(self._lockstep.ranks, "rank")
            known.record.note_fate("divided", loader, f"each batch divided over {ranks},")
            self._tell(known.record.line, logging.INFO)
            self._replicas.tell_of_parts()

    def _sources(
        self, known: _Loader, loader: DataLoader[Any], place: int, *, is_divided: bool, may_go_on: bool
    ) -> Generator[tuple[Iterator[Any], Iterator[Any]]]:
        """Yield the loader's own iterator, and what gives the next batch, when a pass begins, and before each batch.

        Whether a loader trains shows in its loop: some set the mode of their models in each step.

        Args:
            known: What is known of the loader.
            loader: The loader.
            place: Where the pass begins: one that begins where none has trained is whole at first.
            is_divided: Whether its batches are divided from the first one on.
            may_go_on: Whether the others are if the script calls ``backward()`` for the first.
        """
        key, before, asked = object(), self._lockstep.backwards, 0
        is_whole = not is_divided and not self._replicas.are_evaluated and torch.is_grad_enabled()
        self._numbers.enter(key, "common")
        self._running += [known] if is_divided or may_go_on else []
        if known.weights is not None:  # some loops take as many batches as there are, and never ask for the end
            self._end(known.weights, least=2)
        try:
            own = iter(loader if is_divided else known.whole)
            yield own, own
            if is_whole and place in known.trains_at:
                self._numbers.enter(key, "whole")
            while not is_divided:
                self._gradients.weight.take_whole()
                self._note_given(known)
                with self._gradients.looking(_samples_of_first(loader)) if may_go_on and not asked else nullcontext():
                    yield own, own
                asked += 1
                if self._lockstep.backwards > before:
                    known.trains_at.add(place)
                    if may_go_on and not known.record.note:
                        why = self._why_whole(known) if asked == 1 else "several batches before one backward()"
                        known.record.note = why
                        if why:
                            known.record.note_fate("whole", known.whole, "whole on every rank,")
                        elif (parts := self._go_on_divided(known, loader)) is not None:
                            own, is_divided = parts, True
                            break
                    self._numbers.enter(key, "whole")
            self._numbers.enter(key, "own")
            batches = own if self._lockstep.ranks == 1 else self._weighed(known, loader, own)
            while True:
                yield own, batches
        finally:
            self._numbers.leave(key)
            if is_divided or may_go_on:
                self._running.remove(known)
            self._tell(known.record.line, logging.INFO)

    def _note_given(self, known: _Loader) -> None:
        """Note that a loader gives a batch now."""
        if self._given[0] < self._lockstep.backwards:
            self._given_before, self._given = self._given[1], (self._lockstep.backwards, WeakSet())
        self._given[1].add(known)

    def _why_whole(self, known: _Loader) -> str:
        """Return why the gradients of a loader's batches cannot be averaged; nothing if they can."""
        given, backwards = self._given[1], self._lockstep.backwards
        others = {each for each in (given if self._given[0] < backwards else self._given_before) if each is not known}
        are_uneven = not all(each.is_even for each in (known, *others) if others & {*self._running})
        return self._gradients.why_whole or "batches of several loaders before one backward()" * are_uneven

    def _go_on_divided(self, known: _Loader, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """Return what gives this rank's part of each batch but the first, which was whole; None if that was all."""
        with unpatched():
            numbers = GlobalState.capture().copied()
            state = loader_state(known.whole, batches_done=1)
            if epoch_after(state) != patched_sampler("autopatch", known.whole).rank_passes.epochs.current:
                return None  # it was the last one
            forget_iterator(known.whole)
            self._divide(known, loader)
            resume_loader(loader, state, counts_rest=False)
            iterator = iter(loader)
            numbers.install()  # one process begins no second iterator, which draws a seed
            return iterator

    def _weighed(self, known: _Loader, loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a divided pass, and note the weight of each."""
        step, ranks = self._gradients.weight, self._lockstep.ranks
        known.weights = weights = PassWeights(known.record.place)
        for batch, record in steps_of("autopatch", patched_facts("autopatch", loader), iterator):
            whole, part = record.samples_of_all or 1, record.real_samples  # a divided batch's are known
            self._note_given(known)
            step.take(weights, ranks * part / whole, (part, whole), batch)
            yield batch
        self._end(weights)

    def _end(self, weights: PassWeights, least: int = 1) -> None:
        """Let a divided pass be over; tell the user if it gave so many batches and trained with none."""
        if len(weights.weights) >= least and not (weights.has_trained or weights.is_over):
            self._tell(
                f"The loader made at {weights.name} was divided, and backward() was not called in its pass: what was "
                "computed is of a part. If it evaluates, iterate it under torch.no_grad(), or pass --whole "
                f"{weights.name}."
            )
        weights.is_over = True

    # ---- the end ----

    def _finish(self) -> None:
        """End together, and compare the parameters once more."""
        self._replicas.meet("has come to its end")

    def _explain(self, error: BaseException) -> None:
        """Say in an error of the script what it may not see: its rank, or the whole of a batch."""
        if isinstance(error, KeyError) and is_started() and {*error.args} & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
            error.add_note(
                f"ddp_patch: as one process, the script sees no {error.args[0]}. If it needs that, pass --mode ranks."
            )
        step = self._gradients.weight
        if isinstance(error, Exception) and not isinstance(error, DDPPatchError) and step.samples and step.taken:
            part, whole = step.samples
            error.add_note(
                f"ddp_patch: each rank has a part of each batch here, this one {part} of {whole} samples. "
                f"If the script counts on the batch size, take that from the batch, or pass --whole {step.name}."
            )


def _call_stack() -> int:
    """Return a number that stands for all lines of the call stack."""
    frame: FrameType | None = sys._getframe(1)
    lines = list[tuple[str, int]]()
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return hash(tuple(lines))


def _samples_of_first(loader: DataLoader[Any]) -> int | None:
    """Return how many samples the first batch of a loader has; None if that is not known."""
    size, length = loader.batch_size, length_of(loader.sampler, ())
    return size if size is None or length is None else min(size, length)


def _is_initialized() -> bool:
    """Return whether there is a process group, to torch and this package alone.

    A script of one process has none: what asks sums up the counts of several ranks, which here count the same.
    """
    asks = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
    return asks in {"torch", "ddp_patch"} and dist.distributed_c10d.is_initialized()


def _go_on_after(one: DataLoader[Any], other: DataLoader[Any]) -> None:
    """Let the next pass over one form of a loader have the epoch after that of the latest pass over the other form."""
    before, after = (patched_sampler("autopatch", each) for each in (one, other))
    if before.rank_passes.epochs.upcoming > after.rank_passes.epochs.upcoming:
        after.set_epoch(before.rank_passes.epochs.upcoming)


class _Pass(AroundIterator):
    """The iterator of a pass over a loader: of whole batches, and from some batch on of this rank's part of each.

    Args:
        sources: Gives the loader's own iterator, and what gives the next batch: when the pass begins, and before each.
        lockstep: The ranks.
    """

    def __init__(self, sources: Generator[tuple[Iterator[Any], Iterator[Any]]], lockstep: Lockstep) -> None:
        self._sources, self._lockstep = sources, lockstep
        super().__init__(next(sources)[0])

    def __next__(self) -> Any:
        self.wrapped, self._batches = next(self._sources, (self.wrapped, iter(())))
        with self._lockstep.fetching():
            return super().__next__()

    def stop(self, reason: BaseException) -> None:
        """Leave the pass at its end."""
        if isinstance(reason, StopIteration):
            self._sources.close()
