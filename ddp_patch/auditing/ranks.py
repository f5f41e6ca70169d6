"""Iterate each rank's own loader as its training would, and hear which samples it gives."""

import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import getclosurevars
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, get_worker_info

from ddp_patch.auditing.drawn import Coding, Identity, RankDraws, identities, narrow
from ddp_patch.auditing.subject import Audited, Traits, base_of, digest, indexed, made_by
from ddp_patch.compat.private_torch import (
    RUNNING_ITERATOR,
    has_own_iteration,
    has_own_iterators,
    noted_worker_info,
    worker_info_told,
)
from ddp_patch.errors import StreamLengthWarning
from ddp_patch.loaders.copying import OWN_METHODS, change_loader
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.loaders.samples import steps_of, tell_epoch
from ddp_patch.orders.generators import generator_state, random_generators, set_generator_state
from ddp_patch.orders.random_states import PrivateRNG, look
from ddp_patch.ranks.mailbox import unwatched
from ddp_patch.walks import stored

__all__ = ["Rank", "called"]


class Given(NamedTuple):
    """Stand for a batch.

    Attributes:
        items: What tells its samples from others.
        worker: The worker that made it.
        asked: Whether the dataset had asked there which worker it is in.
    """

    items: list[Identity]
    worker: int
    asked: bool


class _Listener:
    """Makes of each batch what is heard of it, in the process that made it.

    Args:
        prepare: The user's ``worker_init_fn``.
        are_batches: Whether a step gives several items; else it gives one.
        by_value: Whether items are samples, to be compared by value.
    """

    def __init__(self, prepare: Callable[[int], object] | None, are_batches: bool, by_value: bool) -> None:
        self._prepare, self._are_batches, self._by_value = prepare, are_batches, by_value
        self._asked = self._reached = False

    def collate(self, batch: Any) -> Given:
        """Serve as a ``collate_fn``."""
        info = get_worker_info()
        worker = 0 if info is None else object.__getattribute__(info, "id")  # which notes nothing
        return Given(identities(batch if self._are_batches else [batch], self._by_value), worker, self._asked)

    def begin(self, worker: int) -> None:
        """Serve as a ``worker_init_fn``: from now on, note whether somebody asks which worker this is.

        That the user's function asks for its number says nothing, because most do so to seed a worker; but that it
        changes the dataset does.
        """
        info: Any = get_worker_info()
        told = noted_worker_info(info.id, info.num_workers, info.seed, info.dataset, self._note)
        worker_info_told(told).__enter__()  # for as long as this process lives
        before = dict(getattr(info.dataset, "__dict__", {}))
        if self._prepare is not None:
            self._prepare(worker)
        after = getattr(info.dataset, "__dict__", {})
        is_changed = before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())
        self._asked = self._reached or is_changed

    def _note(self, name: str) -> None:
        self._asked |= name != "dataset"
        self._reached |= name == "dataset"


def _heard(facts: LoaderFacts[Any], subject: Audited, traits: Traits) -> DataLoader[Any]:
    """Return a rank's loader, made to give what is heard of its batches.

    Workers matter only where they read: of an iterable dataset. Elsewhere there are none, and no sample is read. A
    factory's loader stays as it is, and so does one whose class has an iteration of its own, which would expect the
    user's batches: they are heard as torch's own loader.
    """
    is_iterable, kind = facts.unit is ShardedUnit.ITERABLE, type(facts.loader)
    are_batches = facts.loader.batch_sampler is not None or traits.units == "batches"
    listener = _Listener(getattr(facts.loader, "worker_init_fn", None), are_batches, subject.by_contents)
    new: dict[str, Any] = {"collate_fn": listener.collate, "pin_memory": False}
    if not is_iterable:
        new |= {"dataset": facts.dataset if subject.by_contents else indexed(facts.dataset)}
        new |= {"num_workers": 0, "timeout": 0, "persistent_workers": False, "prefetch_factor": None}
    elif not subject.patches:
        new |= {"worker_init_fn": listener.begin}
    if not (subject.is_made or has_own_iteration(kind) or has_own_iterators(kind)):
        return change_loader(facts.loader, **new)
    plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
    kept = {name: value for name, value in vars(facts.loader).items() if name not in OWN_METHODS}
    # A loader around another one, as accelerate's, has that one's attributes without holding them.
    others = [name for name in vars(DataLoader([0])) if name not in kept and hasattr(facts.loader, name)]  # type: ignore[arg-type]  # torch takes any sequence
    kept |= {name: getattr(facts.loader, name) for name in others}
    if not is_iterable:
        new["sampler" if facts.loader.batch_sampler is None else "batch_sampler"] = facts.iterated
    vars(plain).update(kept | {RUNNING_ITERATOR: None} | new)
    return plain


def _drawn(begin: Callable[[], Iterator[Given]], coding: Coding, most: int, readers: int) -> RankDraws:
    """Draw an epoch, or its first items.

    Args:
        begin: Begins it.
        coding: Gives every item its number.
        most: Stop when there are this many items.
        readers: How many workers read an iterable dataset; 0 of any other.
    """
    items, sizes, by_worker = array("q"), array("q"), Counter[int]()
    steps, asked, ended, error = iter(list[Given]()), False, False, None
    try:
        steps = begin()
        for given in steps:
            items.extend(coding.codes(given.items))
            sizes.append(len(given.items))
            by_worker[given.worker] += len(given.items)
            asked |= given.asked
            if max(len(items), len(sizes)) >= most:
                break
        else:
            ended = True
    except Exception as raised:  # noqa: BLE001 - the user's own: this rank would see it, too
        error = _as_text(raised)
    if not (ended or error):
        # Ask for one step more: the epoch may end right here. An error beyond the last item asked for is none.
        with suppress(Exception):
            ended = next(steps, None) is None
    of_each = tuple(by_worker[worker] for worker in range(readers))
    return RankDraws(narrow(items), narrow(sizes), ended, error=error, asked=asked, by_worker=of_each)


def _as_text(raised: Exception) -> str:
    """Return an exception as text; of one that torch sends from a worker, the last line of its traceback."""
    text = str(raised)
    if " in DataLoader worker process " in text.partition("\n")[0]:
        return text.rstrip().rpartition("\n")[2]
    return f"{type(raised).__name__}: {text}"


# Seed simulated ranks with this and their rank, so that no two are seeded alike.
_SEED = 20_000


class Rank:
    """Stand for one rank.

    A rank has its own loader and its own global random states. Copies of a loader may share a random generator, so each
    rank also keeps its own state of every shared generator.

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
        self._ambient = PrivateRNG(_SEED, seeded_as)
        make = subject.make
        given, reached = (make.stream.holders, []) if isinstance(make, LoaderFacts) else ((), _reached_by(make))
        with look(random_generators(reached)), self._ambient, unwatched():
            facts = subject.made_for(rank, world_size, is_real)
            held = random_generators([*reached, *_with_shared([*facts.stream.holders, *given])])
        self._facts: LoaderFacts[Any] = facts
        self._held = [[generator, generator_state(generator)] for generator in held]
        self.traits: Traits = Traits.of(facts)
        self.base: object = base_of(facts.dataset)
        self._loader = _heard(facts, subject, self.traits)

    @property
    def digest(self) -> str | None:
        """Return a hash of the samples that this dataset holds in memory; None where it holds none."""
        return digest(self.base)

    def epoch(self, number: int, coding: Coding) -> RankDraws:
        """Iterate the loader once more, as epoch ``number``."""
        loader, traits = self._facts.loader, self.traits
        readers = max(1, traits.num_workers) if traits.is_iterable else 0
        with warnings.catch_warnings(), self._own_generators(), self._ambient, unwatched():
            # The audit reports wrong lengths itself.
            warnings.simplefilter("ignore", StreamLengthWarning)
            warnings.filterwarnings("ignore", "Length of IterableDataset")
            if self._subject.set_epoch:
                _set_epoch(self._facts, number)
            before = steps_of(loader)
            drawn = _drawn(lambda: iter(self._loader), coding, self._subject.max_items, readers)
            return replace(drawn, lengths=(before, steps_of(loader)))

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Give shared generators this rank's states, and restore the others' afterwards."""
        with look(generator for generator, _ in self._held):
            for generator, state in self._held:
                set_generator_state(generator, state)
            yield
            for held in self._held:
                held[1] = generator_state(held[0])


def called(make: Callable[..., Any], *rank_and_size: int) -> Any:
    """Call a function ``make()`` or ``make(rank, world_size)``, and leave all random states as they are."""
    with look(random_generators(_reached_by(make)), seed=_SEED), unwatched():
        return made_by(make, *rank_and_size) if rank_and_size else make()


def _reached_by(make: Callable[..., Any]) -> list[object]:
    """Return what may hold generators that a factory uses for all ranks: itself, and the object of a method."""
    return _with_shared([SimpleNamespace(make=make), getattr(make, "__self__", make)])


def _with_shared(holders: Sequence[object]) -> list[object]:
    """Return the holders and what all copies of them share: their classes, and what their functions name."""
    written = [dict(vars(kind)) for holder in holders for kind in type(holder).__mro__]
    shared: list[dict[str, Any]] = []
    for function in [value for names in (*map(stored, holders), *written) for value in names.values()]:
        if isinstance(function, FunctionType):
            with suppress(ValueError):  # what it names has no value yet
                named = getclosurevars(function)
                shared += [dict(named.nonlocals), dict(named.globals)]
    return [*holders, *(SimpleNamespace(**names) for names in (*written, *shared))]


def _set_epoch(facts: LoaderFacts[Any], epoch: int) -> None:
    if callable(tell := getattr(facts.loader, "set_epoch", None)):
        tell(epoch)
    else:
        tell_epoch(facts.iterated, epoch)
        if facts.unit is ShardedUnit.ITERABLE and callable(tell := getattr(facts.dataset, "set_epoch", None)):
            tell(epoch)
