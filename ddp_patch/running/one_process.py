"""Run a script of one process on several ranks as one: its batches are divided, its gradients averaged."""

import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from time import perf_counter
from typing import Any, cast
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
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit, look_at
from ddp_patch.loaders.hooks import Use
from ddp_patch.loaders.samples import length_of
from ddp_patch.options import Options
from ddp_patch.orders.random_states import GlobalState, loader_seed
from ddp_patch.patching import patch_each
from ddp_patch.ranks.exchange import digest
from ddp_patch.ranks.world import World, find_world
from ddp_patch.resume import loader_state, resume_loader
from ddp_patch.running.gradients import Gradients, PassWeights
from ddp_patch.running.launch import is_hidden, told, unhidden
from ddp_patch.running.loader_reports import Patterns, UsedLoader, compared, counted, is_off, unpatched
from ddp_patch.running.lockstep import Act, Counts, Lockstep
from ddp_patch.running.random_numbers import RandomNumbers, seed_all
from ddp_patch.running.replicas import Replicas
from ddp_patch.running.session import Session, as_it_was_if_refused, is_too_soon, logger, user_of
from ddp_patch.running.shadow import is_shadowed, shadowed
from ddp_patch.sharding.batches import batches_of, patched_sampler

__all__ = ["Mode", "OneProcess", "OneProcessOptions", "group_made"]


_DATA_MADE_ALIKE = (
    "In a loop over a divided loader, random numbers differ between the ranks from the first optimizer step on: make "
    "random data outside of such loops, or with a generator of its own."
)
_TWO_LINES = (
    "DistributedDataParallel averages while backward() still computes: torch.distributed.init_process_group() at the "
    "start, and model = torch.nn.parallel.DistributedDataParallel(model)"
)


_END = object()
_init_process_group = dist.init_process_group  # which scripts may not call


@contextmanager
def group_made(backend: str, **options: Any) -> Iterator[None]:
    """Make a process group, and destroy it at the end."""
    with unhidden():
        _init_process_group(backend, **options)
    try:
        yield
    finally:
        if dist.is_initialized():  # the script may have destroyed it already
            dist.destroy_process_group()


def _backend_here() -> str:
    """Choose this rank's GPU, where there are some, and return the backend of a process group that uses it.

    Raises:
        WorldError: The environment does not say which GPU is this rank's.
    """
    count = torch.cuda.device_count()
    if not count:
        return "gloo"
    # A launcher may show each rank its own one alone.
    number = "0" if count == 1 else told("LOCAL_RANK").strip()
    if not number.isdecimal() or int(number) >= count:
        raise WorldError(
            f"This process sees {count} GPUs, from 0 to {count - 1}, and LOCAL_RANK={number or None} does not say "
            "which is this rank's. Set LOCAL_RANK, as torchrun does, and start as many ranks here as there are GPUs."
        )
    torch.cuda.set_device(int(number))
    return "cpu:gloo,cuda:nccl"


class Mode(Enum):
    """How a script's ranks train."""

    UNDECIDED = "undecided"
    ONE_PROCESS = "one process"
    RANKS = "ranks"


@dataclass(frozen=True)
class OneProcessOptions:
    """How ranks train as one process.

    Attributes:
        mode: ``Mode.UNDECIDED`` for what the script shows when it first uses a loader or makes an optimizer.
        whole: Loaders that are made there are never divided.
        sync_batchnorm: Whether batch normalisation sees the whole batch.
        on_decision: Called with the mode when it is decided.
        on_error: Called with what ends the script on this rank, before the others are told.
    """

    mode: Mode = Mode.UNDECIDED
    whole: Patterns = field(default_factory=Patterns)
    sync_batchnorm: bool = False
    on_decision: Callable[[Mode], object] = lambda mode: None
    on_error: Callable[[BaseException], object] = lambda error: None


@dataclass
class _Loader:
    """What is known of a loader of the script, which becomes the divided one when that is first asked for.

    Attributes:
        record: What is reported of it.
        seed: What its order follows from.
        original: A copy of it as the script made it; None if it is left as it is.
        is_whole: Whether it is never divided.
        is_stream: Whether its dataset is iterable.
        whole: A copy that gives every rank all of it, for evaluations under ``no_grad``.
        undecided: A copy that gives every rank all of it, in the order that is divided: for passes of which it is not
            known yet whether the script trains.
        is_divided: Whether the loader itself is divided by now.
        trains: Whether ``backward()`` was called for its batches.
    """

    record: UsedLoader
    seed: int
    original: DataLoader[Any] | None = None
    is_whole: bool = False
    is_stream: bool = False
    whole: DataLoader[Any] | None = None
    undecided: DataLoader[Any] | None = None
    is_divided: bool = False
    trains: bool = False


class OneProcess:
    """Decides how a script is run, when it first uses a loader or makes an optimizer; and runs it as one process.

    Args:
        session: Patches the loaders of a script that makes a process group itself.
        options: How to shard.
        chosen: How to train as one process.

    Attributes:
        mode: How the script is run.
        records: What was done with each loader, in the order of their first use.
    """

    def __init__(self, session: Session, options: Options, chosen: OneProcessOptions) -> None:
        self.mode: Mode = Mode.UNDECIDED
        self.records: list[UsedLoader] = []
        self._session, self._options, self._chosen = session, options, chosen
        # What is known of a loader holds copies of it, with its data, so it goes with the loader.
        self._known: MutableMapping[DataLoader[Any], _Loader] = WeakIdKeyDictionary()
        self._stack = ExitStack()
        self._process = os.getpid()
        self._told: set[str] = set()
        self._world = World(0, 1)
        self._seed = 0
        self._lockstep: Lockstep | None = None
        self._counts = Counts()
        self._prepare()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook optimizers, ``backward()`` and what makes process groups, while entered."""
        make = Optimizer.__init__

        def made(optimizer: Any, *args: Any, **options: Any) -> None:
            make(optimizer, *args, **options)
            self._note_optimizer(optimizer)

        with self._stack, patch.object(Optimizer, "__init__", made):
            makers = [(torch.multiprocessing, "spawn"), (torch.multiprocessing, "start_processes")]
            for module, name in [*makers, (dist, "init_process_group")]:
                around = self._refusing(name, getattr(module, name))
                self._stack.enter_context(patch.object(module, name, around))
            if self._chosen.mode is not Mode.UNDECIDED:
                self._decide()
            try:
                yield
            except BaseException as error:
                if isinstance(error, SystemExit) and not error.code:
                    self._finish()
                    raise
                self._explain(error)
                self._chosen.on_error(error)
                self._leave(error)
                raise
            else:
                self._finish()

    def used(self, loader: DataLoader[Any], use: Use) -> None:
        """Note that a loader is about to be used."""
        if self.mode is Mode.UNDECIDED and dist.is_initialized():
            self._decide()
        if self.mode is Mode.RANKS:
            self._session.used(loader, use)
        elif self.mode is Mode.ONE_PROCESS and use in {Use.ASKED, Use.HANDED} and not is_off():
            with unpatched():
                known = self._look(loader)
                if known.original is not None and not known.is_whole:
                    self._replicas.meet(Act.LOADER)
                    self._divide(known, loader)

    def iterated(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """Return the iterator of a loader's next pass; None if the loader itself makes it."""
        if is_off() or os.getpid() != self._process:
            return None
        user = user_of(loader)
        if is_too_soon(loader, user):
            return None
        self._decide()
        if self.mode is Mode.RANKS or user is not None:
            return None
        with unpatched():  # what looking at it and iterating it iterates
            known = self._look(loader)
            known.record.passes += 1
            if known.original is None:
                return None
            if not torch.is_grad_enabled() or loader.batch_sampler is None:
                return self._whole_pass(known)
            is_evaluated = self._replicas.are_evaluated
            if known.is_stream:  # which cannot be read twice
                known.trains = not is_evaluated
                return self._whole_pass(known) if is_evaluated or known.is_whole else self._divided_pass(known, loader)
            if known.trains and not is_evaluated and not known.is_whole:
                return self._divided_pass(known, loader)
            return self._undecided_pass(known, loader)

    def require_no_wrapper(self, name: str) -> None:
        """Refuse a model that averages gradients by itself."""
        if self.mode is Mode.ONE_PROCESS and (ranks := self._world.num_replicas) > 1:
            raise WorldError(
                f"The script wraps a model in {name} after {ranks} ranks have begun to train as one process, so "
                "its gradients would be averaged twice, and its loaders are divided already. Leave the wrapper out; or "
                "let the script make the process group before it uses a loader or an optimizer, or pass --mode ranks: "
                "then each rank trains on its shard."
            )

    def _refusing(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of torch's that raises while several ranks run the script as one process, or may."""

        def refusing(*args: Any, **options: Any) -> Any:
            ranks = int(told("WORLD_SIZE", "1"))
            if self.mode is Mode.RANKS or os.getpid() != self._process:
                return run(*args, **options)
            if name == "init_process_group" and is_hidden():
                raise WorldError(
                    "The script makes a process group, and its ranks train as one process, which has none. Pass --mode "
                    "ranks: then each rank sees which one it is, and trains on its shard."
                )
            if ranks == 1 or (name == "init_process_group" and self.mode is Mode.UNDECIDED):
                return run(*args, **options)
            if name == "init_process_group":
                raise WorldError(
                    f"The script makes a process group, and {ranks} ranks have begun to train as one process: it had "
                    "none when it first used a loader or made an optimizer. Make it before; or pass --mode ranks, "
                    "which waits for it: then each rank trains on its shard."
                )
            raise WorldError(
                f"The script starts processes by torch.multiprocessing.{name}(), and {ranks} ranks run it already. "
                "Start a script that starts its ranks itself without this command, and patch its loaders there; or let "
                "it train in its own process."
            )

        return refusing

    @property
    def notes(self) -> list[str]:
        """What the summary says beside the table."""
        if self.mode is Mode.UNDECIDED:
            ranks = counted(int(told("WORLD_SIZE", "1")), "rank")
            return [f"The script has used no loader, and made no optimizer of torch.optim: {ranks} ran all of it each."]
        gradients, counts = self._gradients, self._counts
        done = counted(counts.steps, "optimizer step")
        found = []
        if gradients.began_s is not None:
            share = gradients.averaging_s / max(1e-9, perf_counter() - gradients.began_s)
            megabytes = gradients.sent_bytes / 1e6 / max(1, counts.steps)
            done += f", {megabytes:.3g} MB averaged a step, in {share:.0%} of the time"
            if share > 0.2:
                found.append(f"To spend less of it: {_TWO_LINES}.")
            if not any("divided" in record.fate for record in self.records):
                found.append("No loader was divided: every rank computed all of each batch, and no time was saved.")
        found += [*self._chosen.whole.notes(" of --whole"), *self._session.patterns.notes()]
        return [f"{counted(self._world.num_replicas, 'rank')} trained as one process: {done}.", *found]

    def _decide(self) -> None:
        """Decide how the script is run, once: by whether it has made a process group by now."""
        if self.mode is not Mode.UNDECIDED:
            return
        found = Mode.RANKS if dist.is_initialized() else Mode.ONE_PROCESS
        self.mode = found if self._chosen.mode is Mode.UNDECIDED else self._chosen.mode
        self._chosen.on_decision(self.mode)
        if self.mode is Mode.ONE_PROCESS:
            self._begin()

    def _begin(self) -> None:
        options = self._options
        if options.share not in {"auto", "within_batches"} or options.uneven == "drop":
            raise InvalidOptionError(
                f"share={options.share!r} and uneven={options.uneven!r} were given, and the script makes no process "
                "group, so its ranks train as one process, which divides each batch. Leave them out, or pass --mode "
                "ranks to a script that makes a group."
            )
        self._seed = (torch.initial_seed() if options.seed is None else options.seed) % 2**63
        if (dist.get_world_size() if dist.is_initialized() else int(told("WORLD_SIZE", "1"))) > 1:
            self._join()
        self._prepare()
        self._stack.enter_context(self._gradients.hooked())
        train = f"{counted(self._world.num_replicas, 'rank')} {'trains' if self._lockstep is None else 'train'}"
        self._tell(f"{train} as one process; orders and random numbers follow from seed {self._seed}", logging.INFO)

    def _prepare(self) -> None:
        self._numbers = RandomNumbers(self._seed, self._world.rank)
        self._gradients = Gradients(
            self._lockstep, self._counts, self._tell, self._numbers.begin_own, self._tell_unused
        )
        self._replicas = Replicas(self._lockstep, self._gradients, self._counts, self._tell)

    def _join(self) -> None:
        """Make the process group, if there is none, and what the ranks do in it."""
        timeout = self._options.timeout
        if not dist.is_initialized():
            self._stack.enter_context(group_made(_backend_here(), timeout=timedelta(seconds=timeout)))
        self._world = find_world() or World(0, 1)
        self._lockstep = Lockstep(timeout, self._counts)
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
            home = "" if self._world.rank else tempfile.mkdtemp(prefix="ddp_patch-")
            self._stack.enter_context(shadowed(self._world.rank, self._lockstep.gathered(home)[0]))

    def _tell(self, text: str, level: int = logging.WARNING) -> None:
        """Tell the user something, once, on the first rank."""
        if self._world.rank == 0 and text not in self._told:
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
        elif (why := self._session.why_left(facts)) is not None:
            record.note = why
        else:
            known.original, known.is_stream = copy_loader(loader), facts.unit is ShardedUnit.ITERABLE
            if loader.batch_sampler is None:
                record.note = "it makes no batches"
            elif self._chosen.whole.matches(loader):
                record.note = "--whole"
            elif loader.batch_size is not None and loader.batch_size < self._world.num_replicas:
                record.note = f"batches of {loader.batch_size} cannot be divided"
            known.is_whole = bool(record.note)
        return known

    def _shared(self, known: _Loader, loader: DataLoader[Any], world: World) -> LoaderFacts[Any]:
        """Put the part of each batch that is a rank's of a world into a loader; return what the loader was."""
        options = replace(self._options, share="within_batches", uneven="keep", seed=known.seed)
        if world.num_replicas == 1:
            options = replace(options, order="auto")
        with as_it_was_if_refused(loader, known.record, Use.ITERATED, _DATA_MADE_ALIKE):
            facts = look_at(loader)
            patch_each("autopatch", {"": loader}, world, lambda: options, compared(loader), change_loader)
        return facts

    def _divide(self, known: _Loader, loader: DataLoader[Any]) -> None:
        """Put this rank's part of each batch into the loader itself, so that all references to it have that."""
        if known.is_divided:
            return
        facts = self._shared(known, loader, self._world)
        known.is_divided = True
        known.record.note_patched("whole and divided" if known.whole else "divided", facts, loader)
        self._tell(known.record.line, logging.INFO)

    def _divided_pass(self, known: _Loader, loader: DataLoader[Any]) -> Iterator[Any]:
        self._replicas.meet(Act.LOADER)
        self._divide(known, loader)
        if known.undecided is not None:
            _go_on_after(known.undecided, loader)
        iterator = iter(loader)
        key = self._numbers.enter(own=True)
        return _Pass(iterator, self._weighed(known, loader, iterator), partial(self._numbers.leave, key))

    def _undecided_pass(self, known: _Loader, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return a pass over whole batches, which is divided once the script has called ``backward()`` for the first.

        Whether a script trains in a loop shows in the loop: some set the mode of their models in each step.
        """
        self._replicas.share_buffers()
        if self._lockstep is None:
            self._divide(known, loader)
        elif known.undecided is None:
            known.undecided = copy_loader(cast("DataLoader[Any]", known.original))
            facts = self._shared(known, known.undecided, World(0, 1))
            known.record.note_whole("whole", known.undecided, facts)
        undecided = loader if known.undecided is None else known.undecided
        if known.is_divided:
            _go_on_after(loader, undecided)
        iterator, key = iter(undecided), self._numbers.enter(own=False)
        around = _Pass(iterator, iter(()), partial(self._numbers.leave, key))
        around.give(self._decided_by_the_first(known, loader, weakref.ref(around), key))
        return around

    def _decided_by_the_first(
        self, known: _Loader, loader: DataLoader[Any], around: "weakref.ref[_Pass]", key: object
    ) -> Iterator[Any]:
        """Yield whole batches; divide the rest if ``backward()`` was called after the first one.

        Args:
            known: What is known of the loader.
            loader: The loader.
            around: The pass.
            key: Its key of random numbers.
        """
        step, before = self._gradients.weight, self._counts.backwards
        given = 0
        while (current := around()) is not None:
            if given == 1 and self._counts.backwards > before and self._may_divide(known):
                known.trains = True
                with unpatched():
                    current.wrapped = iterator = self._going_on(known, loader, current.wrapped)
                self._numbers.change(key, own=True)
                del current
                yield from self._weighed(known, loader, iterator)
                return
            batch = next(current.wrapped, _END)
            del current
            if batch is _END:
                break
            step.take_whole()
            given += 1
            yield batch
            if given > 1 and self._counts.backwards > before and not known.is_whole:
                known.is_whole, known.record.note = True, "several batches before one backward()"
        self._tell(known.record.line, logging.INFO)
        self._replicas.may_have_changed = True

    def _may_divide(self, known: _Loader) -> bool:
        """Return whether the gradients of a loader's batches may be averaged; note why not."""
        why = self._gradients.why_whole if self._gradients.parameters else "no optimizer of torch.optim"
        known.is_whole = known.is_whole or bool(why)
        known.record.note = known.record.note or why
        return not known.is_whole

    def _going_on(self, known: _Loader, loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
        """Return the iterator of the rest of a pass of which one batch was whole."""
        if self._lockstep is None:
            return iterator
        undecided, numbers = cast("DataLoader[Any]", known.undecided), GlobalState.capture().copied()
        state = loader_state(undecided, batches_done=1)
        forget_iterator(undecided)
        self._replicas.meet(Act.LOADER)
        self._divide(known, loader)
        resume_loader(loader, state, counts_rest=False)
        rest = iter(loader)
        numbers.install()  # one rank begins no second iterator, which draws a seed
        return rest

    def _weighed(self, known: _Loader, loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a divided pass, and note the weight of each."""
        if self._lockstep is None:
            yield from iterator
            return
        step, ranks = self._gradients.weight, self._world.num_replicas
        weights = step.begin(known.record.place, length_of(iterator, ()))
        for batch, record in steps_of("autopatch", loader, batches_of("autopatch", loader), iterator):
            whole, part = record.samples_of_all or 1, record.real_samples  # a divided batch's are known
            of_sum = float(ranks * (part > 0))
            step.take(weights, ranks * part / whole, batch, weight_of_sum=of_sum, samples=(part, whole))
            yield batch
        step.end(weights)
        self._replicas.may_have_changed = True

    def _tell_unused(self, weights: PassWeights) -> None:
        self._tell(
            f"The loader made at {weights.name} was divided, and backward() was not called in its pass: each rank "
            "computed with its own part of the batches. If it evaluates, iterate it under torch.no_grad(), or pass "
            f"--whole {weights.name}: then every rank gets all of it."
        )

    def _whole_pass(self, known: _Loader) -> Iterator[Any]:
        if known.whole is None:
            known.whole = copy_loader(cast("DataLoader[Any]", known.original))
            options = replace(self._options, seed=known.seed, share="auto", cost=None, order="auto")
            with as_it_was_if_refused(known.whole, known.record, Use.ITERATED):
                facts = look_at(known.whole)
                patch_each("autopatch", {"": known.whole}, World(0, 1), lambda: options, place_share=change_loader)
            known.record.note_whole("whole and divided" if known.is_divided else "whole", known.whole, facts)
            self._tell(known.record.line, logging.INFO)
        self._replicas.share_buffers()
        self._gradients.weight.take_whole()
        key = self._numbers.enter(own=False)
        iterator = iter(known.whole)
        return _Pass(iterator, iterator, partial(self._numbers.leave, key))

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        if os.getpid() != self._process:
            return
        self._decide()
        if self.mode is Mode.RANKS:
            return
        self._gradients.add(optimizer)
        self._replicas.make_equal(sync_batchnorm=self._chosen.sync_batchnorm)

    def _finish(self) -> None:
        """End together, and compare the parameters once more."""
        if self.mode is Mode.UNDECIDED and is_hidden():
            self._chosen.on_decision(Mode.ONE_PROCESS)  # no rank was to be another one
        if self._lockstep is not None:
            try:
                self._replicas.meet(Act.END)
            finally:
                self._lockstep.stop()

    def _explain(self, error: BaseException) -> None:
        """Say in an error of the script that it computed with a part of a batch, if it did."""
        step = self._gradients.weight
        if isinstance(error, Exception) and not isinstance(error, DDPPatchError) and step.samples and step.has_taken:
            part, whole = step.samples
            error.add_note(
                f"ddp_patch: each rank has a part of each batch here, this one {part} of {whole} samples. A script "
                f"that counts on the batch size fails so: take the size from the batch, or pass --whole {step.name}."
            )

    def _leave(self, error: BaseException) -> None:
        """End alone, and tell the others why."""
        if self._lockstep is not None:
            why = f"exit code {error.code}" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
            self._lockstep.leave(why.splitlines()[0])


def _go_on_after(one: DataLoader[Any], other: DataLoader[Any]) -> None:
    """Let the next pass over a loader have the epoch after that of the latest pass over another one."""
    before, after = (patched_sampler("autopatch", each) for each in (one, other))
    if before.rank_passes.epochs.upcoming > after.rank_passes.epochs.upcoming:
        after.set_epoch(before.rank_passes.epochs.upcoming)


class _Pass(AroundIterator):
    """The iterator of a pass over a loader.

    Args:
        iterator: The loader's own.
        batches: What it gives.
        leave: Called once, when it has ended or is dropped.
    """

    def __init__(self, iterator: Iterator[Any], batches: Iterator[Any], leave: Callable[[], object]) -> None:
        super().__init__(iterator, lambda _: batches)
        self._leave = weakref.finalize(self, leave)
        self._leave.atexit = False

    def give(self, batches: Iterator[Any]) -> None:
        """Give these batches from now on."""
        self._batches = batches

    def stop(self, reason: BaseException) -> None:
        """Leave it."""
        self._leave()
