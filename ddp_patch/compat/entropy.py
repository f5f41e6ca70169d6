"""Where Python's own modules and torch draw from the system's entropy, each by a name of its own."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

__all__ = ["entropy_drawn_by"]


@contextmanager
def entropy_drawn_by(draw: Callable[[int], bytes]) -> Iterator[None]:
    """Let a function give the system's entropy while entered.

    ``secrets`` and ``uuid`` ask ``random`` and ``os`` for it, and numpy asks ``secrets``. What asks in C does not ask
    here: ``torch.Generator.seed``, ``ssl``, an open ``/dev/urandom``.

    Args:
        draw: Returns so many bytes.
    """
    seed_by = random.Random.seed

    def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
        """Seed a generator of Python's as ``random.Random.seed`` does, which asks the system in C."""
        seed_by(generator, int.from_bytes(draw(32)) if a is None else a, version)

    def seed_torch() -> int:
        """Seed torch's generators as ``torch.seed`` does."""
        drawn = int.from_bytes(draw(8))
        torch.manual_seed(drawn)
        return drawn

    with ExitStack() as stack:
        for owner, name in ((os, "urandom"), (random, "_urandom")):
            stack.enter_context(patch.object(owner, name, draw))
        if hasattr(os, "getrandom"):
            stack.enter_context(patch.object(os, "getrandom", lambda size, flags=0: draw(size)))
        stack.enter_context(patch.object(random.Random, "seed", seed))
        # A bound method, which was taken from the class when Python's module was imported.
        stack.enter_context(patch.object(random, "seed", lambda *args, **options: seed(_global(), *args, **options)))
        stack.enter_context(patch.object(torch, "seed", seed_torch))
        stack.enter_context(patch.object(torch.random, "seed", seed_torch))
        # The names of temporary files come from one generator, which may have been seeded before.
        stack.enter_context(patch.object(tempfile, "_name_sequence", None))
        yield


def _global() -> random.Random:
    """Return the generator that the functions of ``random`` draw from."""
    generator: random.Random = random.random.__self__  # type: ignore[attr-defined]  # a bound method
    return generator
