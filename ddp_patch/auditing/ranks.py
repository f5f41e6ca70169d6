"""Iterate each rank's own loader as its training would, and hear which samples it gives."""

import pickle
import warnings
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import DataLoader, get_worker_info

from ddp_patch.auditing.given import Coding, Identity, Numbers, RankGiven, identities
from ddp_patch.auditing.subject import Audited, Traits, base_of, indexed
from ddp_patch.compat.private_torch import RUNNING_ITERATOR, has_own_iteration, has_own_iterators
from ddp_patch.errors import InvalidOptionError, StreamLengthWarning
from ddp_patch.loaders.copying import OWN_METHODS, change_loader
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.loaders.samples import steps_of, tell_epoch
from ddp_patch.orders.random_states import PrivateRNG, generator_state, look, random_generators, set_generator_state
from ddp_patch.ranks.mailbox import unwatched
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.testing import run_ranks

__all__ = ["Rank", "RealRank", "drawn_anew", "ranks_of"]


def _heard(are_batches: bool, batch: Any) -> tuple[list[Identity], int]:
    """Serve as a ``collate_fn``: return what tells a batch's samples from others, and which worker made it."""
    info = get_worker_info()
    # A patched loader notes who asks which worker this is. This asks nobody.
    worker = 0 if info is None else object.__getattribute__(info, "id")
    return identities(batch if are_batches else [batch]), worker


def _hearing(facts: LoaderFacts[Any], subject: Audited, traits: Traits, by_value: bool) -> DataLoader[Any]:
    """Return a rank's loader, made to give what is heard of its batches.

    Workers matter only where they read: of an iterable dataset. Elsewhere there are none, and no sample is read. A
    factory's loader stays as it is, and so does one whose class has an iteration of its own, which would expect the
    user's batches: they are heard as torch's own loader.
    """
    kind = type(facts.loader)
    are_batches = facts.loader.batch_sampler is not None or traits.units == "batches"
    new: dict[str, Any] = {"collate_fn": partial(_heard, are_batches), "pin_memory": False}
    if not traits.is_iterable:
        new |= {"dataset": facts.dataset if by_value else indexed(facts.dataset)}
        new |= {"num_workers": 0, "timeout": 0, "persistent_workers": False, "prefetch_factor": None}
    if not (subject.is_made or has_own_iteration(kind) or has_own_iterators(kind)):
        return change_loader(facts.loader, **new)
    plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
    kept = {name: value for name, value in vars(facts.loader).items() if name not in OWN_METHODS}
    # A loader around another one, as accelerate's, has that one's attributes without holding them.
    others = [name for name in vars(DataLoader([0])) if name not in kept and hasattr(facts.loader, name)]  # type: ignore[arg-type]  # torch takes any sequence
    kept |= {name: getattr(facts.loader, name) for name in others}
    if not traits.is_iterable:
        new["sampler" if facts.loader.batch_sampler is None else "batch_sampler"] = facts.iterated
    vars(plain).update(kept | {RUNNING_ITERATOR: None} | new)
    return plain


def _drawn(loader: DataLoader[Any], coding: Coding, most: int) -> RankGiven:
    """Draw an epoch, or its first items; stop when there are ``most``."""
    items, sizes, workers = array("q"), array("q"), array("q")
    ended, error = False, None
    steps: Iterator[tuple[list[Identity], int]] = iter(())
    try:
        steps = iter(loader)
        for given, worker in steps:
            items.extend(coding.codes(given))
            sizes.append(len(given))
            workers.append(worker)
            if max(len(items), len(sizes)) >= most:
                break
        else:
            ended = True
    except Exception as raised:  # noqa: BLE001 - the user's own: this rank would see it, too
        text = str(raised)
        # torch sends a worker's error with its traceback.
        is_workers = " in DataLoader worker process " in text.partition("\n")[0]
        error = text.rstrip().rpartition("\n")[2] if is_workers else f"{type(raised).__name__}: {text}"
    if not (ended or error):
        # Ask for one step more: the epoch may end right here. An error beyond the last item asked for is none.
        with suppress(Exception):
            ended = next(steps, None) is None
    return RankGiven(_narrow(items), _narrow(sizes), ended, error=error, workers=_narrow(workers))


def _narrow(numbers: Sequence[int]) -> Numbers:
    """Return whole numbers as an array, in 32 bits where they fit."""
    codes, bounds = np.array(numbers, np.int64), np.iinfo(np.int32)
    fits = not len(codes) or (codes.min() >= bounds.min and codes.max() <= bounds.max)
    return codes.astype(np.int32) if fits else codes


# Seed simulated ranks with this and their rank, so that no two are seeded alike.
_SEED = 20_000


class Rank:
    """Stand for one rank.

    A rank has its own loader and its own global random states. Copies of a loader, and loaders of one factory, may
    share a random generator, so each rank also keeps its own state of every generator.

    Args:
        subject: What is audited.
        rank: The rank.
        world_size: The number of ranks.
        seeded_as: The rank whose global random states this one starts with.
        is_real: Whether this process is that rank, with a process group and its own copy of the subject.

    Attributes:
        traits: Describes its loader.
        base: The dataset below torch's ``Subset`` layers.
    """

    def __init__(self, subject: Audited, rank: int, world_size: int, seeded_as: int, *, is_real: bool = False) -> None:
        self._subject = subject
        self._loader: DataLoader[Any] | None = None
        self._ambient = PrivateRNG(_SEED, seeded_as)
        make = subject.make
        # What the audited loader holds, and what a factory does that is an object or a partial function.
        outer = make.stream.holders if isinstance(make, LoaderFacts) else [SimpleNamespace(make=make)]
        with look(random_generators([] if isinstance(make, LoaderFacts) else outer)), self._ambient, unwatched():
            facts = subject.made_for(rank, world_size, is_real)
            held = random_generators([*facts.stream.holders, *outer])
        self._facts: LoaderFacts[Any] = facts
        self._held = [[generator, generator_state(generator)] for generator in held]
        self.traits: Traits = Traits.of(facts)
        self.base: object = base_of(facts.dataset)

    def epoch(self, number: int, coding: Coding, by_value: bool = False) -> RankGiven:
        """Iterate the loader once more, as epoch ``number``; compare samples by their values or by their indices."""
        facts, traits = self._facts, self.traits
        if self._loader is None:
            self._loader = _hearing(facts, self._subject, traits, by_value)
        with warnings.catch_warnings(), self._own_generators(), self._ambient, unwatched():
            # The audit reports wrong lengths itself.
            warnings.simplefilter("ignore", StreamLengthWarning)
            warnings.filterwarnings("ignore", "Length of IterableDataset")
            if self._subject.set_epoch:
                _set_epoch(facts, number)
            before = steps_of(facts.loader)
            given = _drawn(self._loader, coding, self._subject.max_items)
            workers = given.workers if traits.readers > 1 else None
            return replace(given, lengths=(before, steps_of(facts.loader)), workers=workers, parts=self._parts())

    def _parts(self) -> tuple[int, ...]:
        """Return how many items each worker's part has, if a patched loader's workers read a part each."""
        by = self._facts.sharded_by
        latest = by.rank_passes.latest if isinstance(by, EpochSampler) else None
        if latest is None or not latest.source.is_in_parts:
            return ()
        return tuple(part.length or 0 for part in latest.source.parts(0, 0))

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Give generators this rank's states, and restore the others' afterwards."""
        with look(generator for generator, _ in self._held):
            for generator, state in self._held:
                set_generator_state(generator, state)
            yield
            for held in self._held:
                held[1] = generator_state(held[0])


def _set_epoch(facts: LoaderFacts[Any], epoch: int) -> None:
    if callable(tell := getattr(facts.loader, "set_epoch", None)):
        tell(epoch)
    else:
        tell_epoch(facts.iterated, epoch)
        if facts.unit is ShardedUnit.ITERABLE and callable(tell := getattr(facts.dataset, "set_epoch", None)):
            tell(epoch)


@dataclass(frozen=True, slots=True)
class RealRank:
    """Hold what a real rank was given.

    Attributes:
        traits: Describes its loader.
        epochs: What it was given, by epoch number.
        coding: Gave its items their numbers, in its own process.
    """

    traits: Traits
    epochs: Mapping[int, RankGiven]
    coding: Coding

    @property
    def base(self) -> object:
        """Return what stands for the dataset, which is this process's own."""
        return self

    def epoch(self, number: int, coding: Coding, by_value: bool = False) -> RankGiven:
        """Return an epoch, its items in the numbers of another coding."""
        del by_value  # which a process decides for itself
        given = self.epochs[number]
        return replace(given, items=coding.adopt(self.coding, given.items).astype(np.int64))


_Ranks: TypeAlias = Sequence[Rank | RealRank]


def sampling(rank: int, world_size: int, pickled: bytes, numbers: Sequence[int], seeds: Sequence[int]) -> RealRank:
    """Draw epochs on one rank; errors call it by this name."""
    subject: Audited = pickle.loads(pickled)  # noqa: S301 - the parent's own
    coding = Coding()
    here = Rank(subject, rank, world_size, seeds[rank], is_real=True)
    by_value = subject.is_made and here.traits.is_in_memory  # other ranks may hold other data
    return RealRank(here.traits, {number: here.epoch(number, coding, by_value) for number in numbers}, coding)


def ranks_of(
    subject: Audited,
    seeds: Sequence[int],
    numbers: Sequence[int],
    timeout: float | None,
    only: Sequence[int] | None = None,
) -> _Ranks:
    """Return the ranks of a world.

    Args:
        subject: What is audited.
        seeds: For each rank, as which one it is seeded.
        numbers: The epochs that they will draw.
        timeout: Seconds until every real rank must have returned, each in a process where it draws one epoch after the
            other; None for ranks that this process simulates.
        only: Which ranks to make, where this process simulates them; None for all.

    Raises:
        InvalidOptionError: The subject cannot be pickled for real ranks.
    """
    if timeout is None:
        return [Rank(subject, rank, len(seeds), seeds[rank]) for rank in only or range(len(seeds))]
    try:
        pickled = pickle.dumps(subject)
    except Exception as error:
        raise InvalidOptionError(
            f"audit with processes=True sends what it audits to other processes, and pickling {subject.name} raised "
            f"{type(error).__name__}: {error}. Pass functions of a module, and numbers for cost=."
        ) from error
    return run_ranks(sampling, len(seeds), pickled, numbers, seeds, timeout=timeout)


def drawn_anew(ranks: _Ranks, number: int, coding: Coding, by_value: bool) -> list[RankGiven]:
    """Draw an epoch, and those before it, on new ranks."""
    for before in range(number):
        for rank in ranks:
            rank.epoch(before, coding, by_value)
    return [rank.epoch(number, coding, by_value) for rank in ranks]
