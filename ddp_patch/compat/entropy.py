"""The names by which Python's own modules and torch draw from the system's entropy."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def entropy_drawn_by(draw: Callable[[int], bytes]) -> Iterator[None]:
    """While entered, replace the system's entropy by a function.

    ``secrets`` and ``uuid`` draw from ``random`` and ``os``, and numpy draws from ``secrets``. Code in C is not
    affected: ``torch.Generator.seed``, ``ssl``, an open ``/dev/urandom``.

    Args:
        draw: Returns a number of random bytes.
    """
    seed_by = random.Random.seed

    def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
        """Seed a Python generator as ``random.Random.seed`` does, which draws the system's entropy in C."""
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
        # random.seed is a bound method, which was taken from the class when the module was imported.
        stack.enter_context(patch.object(random, "seed", lambda *args, **options: seed(_global(), *args, **options)))
        stack.enter_context(patch.object(torch, "seed", seed_torch))
        stack.enter_context(patch.object(torch.random, "seed", seed_torch))
        # The names of temporary files come from a generator that may have been seeded before.
        stack.enter_context(patch.object(tempfile, "_name_sequence", None))
        yield


def _global() -> random.Random:
    """Return the generator from which the functions of ``random`` draw."""
    generator: random.Random = random.random.__self__  # type: ignore[attr-defined]  # a bound method
    return generator
