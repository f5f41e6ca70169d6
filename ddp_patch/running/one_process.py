"""Run a script of one process on several ranks as one: its batches are divided, its gradients averaged.

A loader has two forms. Every rank takes all of it from a copy; or a part of each of its batches from the loader itself.
A pass begins whole, and shows by ``backward()`` after its first batch whether it trains: then it goes on divided.
"""

import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from ddp_patch.compat.private_torch import AroundIterator, forget_iterator
from ddp_patch.errors import DDPPatchError, InvalidOptionError, WorldError
from ddp_patch.evaluation.steps import steps_of
from ddp_patch.loaders.copying import change_loader, copy_loader
from ddp_patch.loaders.facts import ShardedUnit, look_at
from ddp_patch.loaders.hooks import Use, called_before
from ddp_patch.loaders.samples import length_of
from ddp_patch.options import Options
from ddp_patch.orders.random_states import GlobalState, loader_seed
from ddp_patch.patching import patch_each
from ddp_patch.ranks.exchange import digest
from ddp_patch.ranks.world import World, find_world
from ddp_patch.resume import loader_state, resume_loader
from ddp_patch.running.gradients import Gradients
from ddp_patch.running.launch import backend_here, group_made, is_hidden, is_started, told
from ddp_patch.running.loader_reports import (
    Patterns,
    UsedLoader,
    as_it_was_if_refused,
    compared,
    counted,
    is_off,
    is_too_soon,
    logger,
    unpatched,
    user_of,
    why_left,
)
from ddp_patch.running.lockstep import Act, Lockstep
from ddp_patch.running.random_numbers import RandomNumbers, seed_all
from ddp_patch.running.replicas import Replicas
from ddp_patch.running.shadow import is_shadowed, shadowed
from ddp_patch.sharding.batches import batches_of, patched_sampler

__all__ = ["OneProcess", "OneProcessOptions"]


_DATA_MADE_ALIKE = (
    "In a loop over a divided loader, random numbers differ between the ranks from the first optimizer step on: make "
    "random data outside of such loops, or with a generator of its own."
)


@dataclass(frozen=True)
class OneProcessOptions:
    """How ranks train as one process.

    Attributes:
        whole: Loaders that are made there are never divided.
        sync_batchnorm: Whether batch normalisation sees the whole batch.
        on_error: Called with what ends the script on this rank, before the others are told.
    """

    whole: Patterns = field(default_factory=lambda: Patterns("--whole"))
    sync_batchnorm: bool = False
    on_error: Callable[[BaseException], object] = lambda error: None


@dataclass
class _Loader:
    """What is known of a loader of the script.

    Attributes:
        record: What is reported of it.
        seed: What its order follows from.
        original: A copy of it as the script made it; None if it is left as it is.
        whole: A copy that gives every rank all of it, from when it is first asked for.
        is_stream: Whether its dataset is iterable, so that it cannot be read twice.
        is_whole: Whether it is never divided.
        is_divided: Whether the loader itself is divided by now.
        trains: Whether ``backward()`` was called for its batches.
    """

    record: UsedLoader
    seed: int
    original: DataLoader[Any] | None = None
    whole: DataLoader[Any] | None = None
    is_stream: bool = False
    is_whole: bool = False
    is_divided: bool = False
    trains: bool = False


class OneProcess:
    """Runs a script as one process, from when it first uses a loader or makes an optimizer.

    Args:
        options: How to shard.
        only: Which loaders alone to divide.
        excepted: Which loaders to leave alone.
        chosen: How to train as one process.

    Attributes:
        records: What was done with each loader, in the order of their first use.
    """

    def __init__(self, options: Options, only: Patterns, excepted: Patterns, chosen: OneProcessOptions) -> None:
        if options.share not in {"auto", "within_batches"} or options.uneven == "drop":
            raise InvalidOptionError(
                f"share={options.share!r} and uneven={options.uneven!r} were given, and as one process the ranks "
                "divide each batch. Leave them out."
            )
        self.records: list[UsedLoader] = []
        self._options, self._only, self._excepted, self._chosen = options, only, excepted, chosen
        # What is known of a loader holds copies of it, with its data, so it goes with the loader.
        self._known: MutableMapping[DataLoader[Any], _Loader] = WeakIdKeyDictionary()
        self._stack = ExitStack()
        self._process = os.getpid()
        self._told: set[str] = set()
        self._seed = 0
        self._has_begun = False
        self._world = World(0, 1)
        self._lockstep = Lockstep()
        self._replicas = Replicas(self._lockstep, self._tell)
        self._numbers = RandomNumbers()
        self._gradients = Gradients(
            self._lockstep, self._replicas, self._tell, self._numbers.begin_own, self._tell_unused
        )

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook optimizers, passes, ``backward()`` and what makes process groups, while entered."""
        make = Optimizer.__init__

        def made(optimizer: Any, *args: Any, **options: Any) -> None:
            make(optimizer, *args, **options)
            if os.getpid() == self._process:
                self._begin()
                self._replicas.add(optimizer, sync_batchnorm=self._chosen.sync_batchnorm)

        with self._stack as stack, patch.object(Optimizer, "__init__", made):
            for module, name in ((torch.multiprocessing, "spawn"), (torch.multiprocessing, "start_processes")):
                around = partial(self._start_processes, name, getattr(module, name))
                stack.enter_context(patch.object(module, name, around))
            make_group = partial(self._make_group, dist.init_process_group)
            stack.enter_context(patch.object(dist, "init_process_group", make_group))
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
                self._chosen.on_error(error)
                why = f"exit code {error.code}" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
                self._lockstep.leave(why.splitlines()[0])
                raise
            else:
                self._finish()

    def _start_processes(self, name: str, start: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._ranks > 1 and os.getpid() == self._process:
            raise WorldError(
                f"The script starts processes by torch.multiprocessing.{name}(), and {self._ranks} ranks run it "
                "already. Start a script that starts its ranks itself without this command, and patch its loaders "
                "there; or let it train in its own process."
            )
        return start(*args, **options)

    def _make_group(self, make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if (self._ranks > 1 or is_hidden()) and os.getpid() == self._process:
            raise WorldError(
                f"The script makes a process group, and {counted(self._ranks, 'rank')} train it as one process, which "
                "has none. Pass --mode ranks: then each rank sees which one it is, and trains on its shard."
            )
        return make(*args, **options)

    def wrapped(self, name: str) -> None:
        """Refuse a model that averages gradients by itself."""
        if self._lockstep.ranks > 1:
            raise WorldError(
                f"The script wraps a model in {name}, and {self._lockstep.ranks} ranks train as one process, so its "
                "gradients would be averaged twice. Leave the wrapper out; or pass --mode ranks: then each rank trains "
                "on its shard."
            )

    def used(self, loader: DataLoader[Any], use: Use) -> None:
        """Divide a loader that a function of this package or a framework is about to use."""
        if self._has_begun and use in {Use.ASKED, Use.HANDED} and not is_off():
            with unpatched():
                known = self._look(loader)
                if known.original is not None and not known.is_whole:
                    self._divide(known, loader)

    def _iterated(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """Return the iterator of a loader's next pass; None if the loader itself makes it."""
        if is_off() or os.getpid() != self._process:
            return None
        user = user_of(loader)
        if user is not None or is_too_soon(loader, user):
            return None
        self._begin()
        with unpatched():  # what looking at it and iterating it iterates
            known = self._look(loader)
            known.record.passes += 1
            if known.original is None:
                return None
            is_evaluation = not torch.is_grad_enabled() or known.is_whole
            if not is_evaluation and (known.trains or known.is_stream) and not self._replicas.are_evaluated:
                return self._divided_pass(known, loader)
            return self._whole_pass(known, loader, may_train=not (is_evaluation or known.is_stream))

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
            found.append("No loader was divided: every rank computed all of each batch, and no time was saved.")
        return [*found, *self._chosen.whole.notes, *self._only.notes, *self._excepted.notes]

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
        self._lockstep.join(timeout)
        self._world = find_world() or self._world
        seeds = self._lockstep.gathered((self._seed, torch.initial_seed()))
        if len(set(seeds)) > 1:
            self._tell("The ranks were seeded differently: all go on with the seed of rank 0.")
            seed_all(seeds[0][1] % 2**63)
        self._seed = seeds[0][0]
        if len(set(self._lockstep.gathered(hash("ddp_patch")))) > 1:
            self._tell(
                "The ranks hash strings differently, so a set of strings has another order on each. Set "
                "PYTHONHASHSEED=0 before they start."
            )
        if not is_shadowed():
            home = "" if self._lockstep.rank else tempfile.mkdtemp(prefix="ddp_patch-")
            self._stack.enter_context(shadowed(self._lockstep.rank, self._lockstep.gathered(home)[0]))

    def _tell(self, text: str, level: int = logging.WARNING) -> None:
        """Tell the user something, once, on the first rank."""
        if self._lockstep.rank == 0 and text not in self._told:
            self._told.add(text)
            logger.log(level, "%s", text)

    def _look(self, loader: DataLoader[Any]) -> _Loader:
        """Return what is known of a loader."""
        if (known := self._known.get(loader)) is not None:
            return known
        facts = look_at(loader)
        record = UsedLoader.of(facts)
        self.records.append(record)
        known = _Loader(record, loader_seed(self._seed, digest(record.what), len(self.records)))
        self._known[loader] = known
        if facts.sharded_by is not None:
            record.fate, record.note = "shards itself", type(facts.sharded_by).__name__
        elif why := why_left(facts, self._only, self._excepted):
            record.note = why
        else:
            known.original, known.is_stream = copy_loader(loader), facts.unit is ShardedUnit.ITERABLE
            if loader.batch_sampler is None:
                record.note = "it makes no batches"
            elif self._chosen.whole.match(loader):
                record.note = "--whole"
            elif loader.batch_size is not None and loader.batch_size < self._lockstep.ranks:
                record.note = f"batches of {loader.batch_size} cannot be divided"
            known.is_whole = bool(record.note)
        return known

    # ---- the two forms of a loader ----

    def _shared(self, known: _Loader, loader: DataLoader[Any], world: World) -> DataLoader[Any]:
        """Put the part of each batch that is a rank's of a world into a loader, and return it."""
        options = replace(self._options, share="within_batches", uneven="keep", seed=known.seed)
        if world.num_replicas == 1:
            options = replace(options, order="auto", cost=None)
            if known.is_stream or loader.batch_sampler is None:
                options = replace(options, share="auto", uneven="pad")
        with as_it_was_if_refused(loader, known.record, Use.ITERATED, _DATA_MADE_ALIKE):
            patch_each("autopatch", {"": loader}, world, lambda: options, compared(loader), change_loader)
        return loader

    def _divide(self, known: _Loader, loader: DataLoader[Any]) -> None:
        """Put this rank's part of each batch into the loader itself, so that all references to it have that."""
        self._replicas.meet(Act.LOADER)
        if not known.is_divided:
            self._shared(known, loader, self._world)
            known.is_divided = True
            known.record.note_fate("divided", loader, self._lockstep.ranks)
            self._tell(known.record.line, logging.INFO)

    def _divided_pass(self, known: _Loader, loader: DataLoader[Any]) -> Iterator[Any]:
        known.trains = True
        self._divide(known, loader)
        _go_on_after(known.whole, loader)
        iterator, key = iter(loader), self._numbers.enter(own=True)
        return _Pass(
            iterator, self._weighed(known, loader, iterator), lambda of: None, partial(self._leave, known, key)
        )

    def _whole_pass(self, known: _Loader, loader: DataLoader[Any], *, may_train: bool) -> Iterator[Any]:
        """Return a pass over whole batches, which goes on divided if the script trains by the first.

        Whether it does shows in the loop: some set the mode of their models in each step.
        """
        self._replicas.share_buffers()
        if known.whole is None and known.original is not None:
            known.whole = self._shared(known, copy_loader(known.original), World(0, 1))
            if not known.is_divided:
                known.record.note_fate("whole", known.whole, 1)
        _go_on_after(loader if known.is_divided else None, known.whole)
        key, lockstep = self._numbers.enter(own=False), self._lockstep
        before = lockstep.backwards

        def before_each(this: _Pass) -> None:
            if this.is_divided:
                return
            if may_train and not known.is_whole and lockstep.backwards > before:
                if this.given == 1 and self._may_divide(known):
                    self._go_on_divided(known, loader, this, key)
                    return
                if this.given > 1:
                    known.is_whole, known.record.note = True, "several batches before one backward()"
            self._gradients.weight.take_whole()

        iterator = iter(known.whole)  # type: ignore[arg-type]  # it is there by now
        return _Pass(iterator, iterator, before_each, partial(self._leave, known, key))

    def _may_divide(self, known: _Loader) -> bool:
        """Return whether the gradients of a loader's batches may be averaged; note why not."""
        why = self._gradients.why_whole if self._replicas.parameters else "no optimizer of torch.optim"
        known.is_whole, known.record.note = bool(why), why
        return not why

    def _go_on_divided(self, known: _Loader, loader: DataLoader[Any], this: "_Pass", key: object) -> None:
        """Let a pass of which one batch was whole give this rank's part of each of the others."""
        with unpatched():
            numbers = GlobalState.capture().copied()
            state = loader_state(known.whole, batches_done=1)  # type: ignore[arg-type]  # the pass is over it
            forget_iterator(known.whole)  # type: ignore[arg-type]  # as above
            known.trains = True
            self._divide(known, loader)
            resume_loader(loader, state, counts_rest=False)
            iterator = iter(loader)
            numbers.install()  # one process begins no second iterator, which draws a seed
        this.go_on(iterator, self._weighed(known, loader, iterator))
        self._numbers.change(key, own=True)

    def _weighed(self, known: _Loader, loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a divided pass, and note the weight of each."""
        step, ranks = self._gradients.weight, self._lockstep.ranks
        if ranks == 1:
            yield from iterator
            return
        weights = step.begin(known.record.place, length_of(iterator, ()))
        for batch, record in steps_of("autopatch", loader, batches_of("autopatch", loader), iterator):
            whole, part = record.samples_of_all or 1, record.real_samples  # a divided batch's are known
            step.take(weights, ranks * part / whole, (part, whole), batch)
            yield batch
        step.end(weights)

    def _leave(self, known: _Loader, key: object) -> None:
        """Note that a pass has ended, or is dropped."""
        self._numbers.leave(key)
        self._tell(known.record.line, logging.INFO)

    def _tell_unused(self, name: str) -> None:
        self._tell(
            f"The loader made at {name} was divided, and backward() was not called in its pass: each rank computed "
            f"with its own part of the batches. If it evaluates, iterate it under torch.no_grad(), or pass --whole "
            f"{name}: then every rank gets all of it."
        )

    # ---- the end ----

    def _finish(self) -> None:
        """End together, and compare the parameters once more."""
        self._replicas.meet(Act.END)

    def _explain(self, error: BaseException) -> None:
        """Say in an error of the script that it computed with a part of a batch, if it did."""
        step = self._gradients.weight
        if isinstance(error, Exception) and not isinstance(error, DDPPatchError) and step.samples and step.taken:
            part, whole = step.samples
            error.add_note(
                f"ddp_patch: each rank has a part of each batch here, this one {part} of {whole} samples. A script "
                f"that counts on the batch size fails so: take the size from the batch, or pass --whole {step.name}."
            )


def _go_on_after(one: DataLoader[Any] | None, other: DataLoader[Any] | None) -> None:
    """Let the next pass over one form of a loader have the epoch after that of the latest pass over the other form."""
    if one is not None and other is not None:
        before, after = (patched_sampler("autopatch", each) for each in (one, other))
        if before.rank_passes.epochs.upcoming > after.rank_passes.epochs.upcoming:
            after.set_epoch(before.rank_passes.epochs.upcoming)


class _Pass(AroundIterator):
    """The iterator of a pass over a loader.

    Args:
        iterator: The loader's own.
        batches: What it gives.
        before_each: Called with this before each batch.
        leave: Called once, when it has ended or is dropped.

    Attributes:
        given: How many batches it has given.
        is_divided: Whether they come in parts by now.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        batches: Iterator[Any],
        before_each: Callable[["_Pass"], object],
        leave: Callable[[], object],
    ) -> None:
        super().__init__(iterator, lambda _: batches)
        self.given, self.is_divided = 0, False
        self._before_each = before_each
        self._leave = weakref.finalize(self, leave)
        self._leave.atexit = False

    def __next__(self) -> Any:
        self._before_each(self)
        return super().__next__()

    def go_on(self, iterator: Iterator[Any], batches: Iterator[Any]) -> None:
        """Give these batches from now on."""
        self.wrapped, self._batches, self.is_divided = iterator, batches, True

    def count(self, given: Any) -> Any:
        self.given += 1
        return given

    def stop(self, reason: BaseException) -> None:
        """Leave it."""
        self._leave()
