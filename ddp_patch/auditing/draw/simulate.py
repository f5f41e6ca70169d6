"""Simulate one rank in this process: with its own random states, but without a process or network."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from ddp_patch.auditing.draw.coding import Coding, Numbers
from ddp_patch.auditing.draw.drawing import draw
from ddp_patch.auditing.draw.drawn import Drawn
from ddp_patch.auditing.draw.samples import base_of, digest, layers_of
from ddp_patch.auditing.draw.subject import Factory, Subject, made_by
from ddp_patch.auditing.draw.traits import Traits, traits_of
from ddp_patch.auditing.draw.workers import Workers
from ddp_patch.errors import StreamLengthWarning
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.loaders.nesting import tell_epoch
from ddp_patch.ranks.notices import unwatched
from ddp_patch.streams.generators import generator_state, random_generators, set_generator_state, unmoved
from ddp_patch.streams.random_states import PrivateRNG

__all__ = ["Rank", "called", "ranks_of", "returned_by"]

# Seed simulated ranks with this and their rank, so that no two are seeded alike.
_SEED = 20_000


class Rank:
    """Simulate one rank.

    A rank has its own loader and its own global random states. Copies of a loader may share a random generator, so each
    rank also keeps its own state of every shared generator.

    Args:
        build: Makes the rank's loader and looks at it.
        subject: What is audited.
        seeded_as: The rank whose global random states this one starts with.
    """

    def __init__(self, build: Callable[[], LoaderFacts[Any]], subject: Subject, seeded_as: int) -> None:
        self._subject = subject
        self._ambient = PrivateRNG(_SEED, seeded_as)
        make = subject.make
        given, reached = (make.stream.holders, []) if isinstance(make, LoaderFacts) else ((), _reached_by(make))
        with self._ambient, unmoved(random_generators(reached)), unwatched():
            self._facts: LoaderFacts[Any] = build()
            held = random_generators([*reached, *self._facts.stream.holders, *given])
        self._workers = Workers(self._facts)
        self._held = [[generator, generator_state(generator)] for generator in held]

    @property
    def traits(self) -> Traits:
        """Return the traits of its loader."""
        return traits_of(self._facts)

    @property
    def base(self) -> object:
        """Return the dataset below torch's ``Subset`` layers."""
        return base_of(self._facts.dataset)

    @property
    def digest(self) -> str | None:
        """Return a hash of the samples that this dataset holds in memory; None where it holds none."""
        return digest(self.base)

    @property
    def layers(self) -> Sequence[Numbers]:
        """Return the indices of this dataset and of each ``Subset`` above it."""
        return layers_of(self._facts.dataset)

    def epoch(self, number: int, coding: Coding) -> Drawn:
        """Draw the loader's next pass as epoch ``number``."""
        with warnings.catch_warnings(), self._ambient, self._own_generators():
            warnings.simplefilter("ignore", StreamLengthWarning)  # the audit reports wrong lengths itself
            if self._subject.set_epoch:
                _set_epoch(self._facts, number)
            return draw(self._facts, self._workers, coding, self._subject)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Give shared generators this rank's states, and restore the others' afterwards."""
        with unmoved(generator for generator, _ in self._held):
            for generator, state in self._held:
                set_generator_state(generator, state)
            yield
            for held in self._held:
                held[1] = generator_state(held[0])


def ranks_of(subject: Subject, seeds: Sequence[int]) -> list[Rank]:
    """Return all ranks of a world, simulated.

    Args:
        subject: What is audited.
        seeds: For each rank, as which one it is seeded.
    """

    def build(rank: int) -> Callable[[], LoaderFacts[Any]]:
        return lambda: subject.made_for(rank, len(seeds))

    return [Rank(build(rank), subject, seed) for rank, seed in enumerate(seeds)]


def called(make: Callable[[], Any]) -> Any:
    """Call the user's function, and leave all random states as they are."""
    with _random_states_kept(make):
        return make()


def returned_by(make: Factory) -> Any:
    """Return what a factory returns for a single process, and leave all random states as they are."""
    with _random_states_kept(make):
        return made_by(make, 0, 1)


@contextmanager
def _random_states_kept(make: Callable[..., Any]) -> Iterator[None]:
    with PrivateRNG(_SEED, 0), unmoved(random_generators(_reached_by(make))), unwatched():
        yield


def _reached_by(make: Callable[..., Any]) -> list[object]:
    """Return what may hold generators that a factory uses for all ranks: itself, and the object of a method."""
    return [SimpleNamespace(make=make), getattr(make, "__self__", make)]


def _set_epoch(facts: LoaderFacts[Any], epoch: int) -> None:
    if callable(tell := getattr(facts.loader, "set_epoch", None)):
        tell(epoch)
    else:
        tell_epoch(facts.iterated, epoch)
        if facts.level is Level.ITERABLE and callable(tell := getattr(facts.dataset, "set_epoch", None)):
            tell(epoch)
