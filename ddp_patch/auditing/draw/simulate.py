"""One rank of a made-up world, on this machine: its own random states, and no process or network."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.auditing.draw.coding import Coding
from ddp_patch.auditing.draw.drawing import Drawn, draw
from ddp_patch.auditing.draw.subject import Subject
from ddp_patch.auditing.draw.traits import Traits, traits_of
from ddp_patch.errors import StreamLengthWarning
from ddp_patch.loaders.facts import Level, level_of
from ddp_patch.loaders.nesting import tell_epoch
from ddp_patch.loaders.recognition import samplers_in_use
from ddp_patch.streams.generators import generator_state, random_generators, set_generator_state, unmoved
from ddp_patch.streams.seeding import PrivateRNG

__all__ = ["Rank", "ranks_of"]

# What ranks of a made-up world are seeded with: like no two of each other.
_SEED = 20_000


class Rank:
    """One rank: its loader, its own global random states, and its own states of generators that copies share.

    Args:
        build: Makes its loader.
        subject: What is audited.
        seeded_as: Which rank's global random states it begins with.
    """

    def __init__(self, build: Callable[[], DataLoader[Any]], subject: Subject, seeded_as: int) -> None:
        self._subject = subject
        self._ambient = PrivateRNG(_SEED, seeded_as)
        # What a factory, or a function that cannot be copied, reaches is shared with the other ranks here alone.
        make = subject.make
        reached = (
            [SimpleNamespace(make=make), getattr(make, "__self__", make)] if not isinstance(make, DataLoader) else []
        )
        with self._ambient, unmoved(random_generators(reached)):
            self._loader: DataLoader[Any] = build()
            loaders = [self._loader, *([subject.make] if isinstance(subject.make, DataLoader) else [])]
            held = random_generators(
                [*reached, *(holder for one in loaders for holder in (one, *samplers_in_use(one)))]
            )
        self._held = [[generator, generator_state(generator)] for generator in held]

    @property
    def traits(self) -> Traits:
        """Its loader's."""
        return traits_of(self._loader)

    def epoch(self, number: int, coding: Coding) -> Drawn:
        """Draw the next pass, as the epoch of this number."""
        with warnings.catch_warnings(), self._ambient, self._own_generators():
            warnings.simplefilter("ignore", StreamLengthWarning)  # lengths are judged here
            if self._subject.set_epoch:
                _set_epoch(self._loader, number)
            return draw(self._loader, coding, self._subject)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        with unmoved(generator for generator, _ in self._held):
            for generator, state in self._held:
                set_generator_state(generator, state)
            yield
            for held in self._held:
                held[1] = generator_state(held[0])


def ranks_of(subject: Subject, world_size: int, alike: bool = False) -> list[Rank]:
    """Return every rank of a made-up world; seeded differently, or ``alike``."""

    def build(rank: int) -> Callable[[], DataLoader[Any]]:
        return lambda: subject.loader(rank, world_size)

    return [Rank(build(rank), subject, seeded_as=0 if alike else rank) for rank in range(world_size)]


def _set_epoch(loader: Any, epoch: int) -> None:
    if callable(tell := getattr(loader, "set_epoch", None)):
        tell(epoch)
    else:
        tell_epoch(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, epoch)
        if level_of(loader) is Level.ITERABLE and callable(tell := getattr(loader.dataset, "set_epoch", None)):
            tell(epoch)
