"""Find, read and restore random generators in objects. The global ones are in ``random_states.py``."""

import base64
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = [
    "LOOKED_AT",
    "RandomGenerator",
    "generator_state",
    "generator_states",
    "plain",
    "random_generators",
    "set_generator_state",
    "set_generator_states",
    "torch_generators",
    "unmoved",
]

RandomGenerator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

# How many elements of a container are looked at.
LOOKED_AT = 32
# How deep generators are looked for: an attribute, what it holds, what that holds, and once more.
_DEPTH = 3


def torch_generators(holders: Iterable[object]) -> list[torch.Generator]:
    """Return the ``torch.Generator`` objects that the holders draw from, each once."""
    return [rng for rng in random_generators(holders) if isinstance(rng, torch.Generator)]


def random_generators(holders: Iterable[object]) -> list[RandomGenerator]:
    """Return the random generators that can be found in the holders' attributes, each once.

    An attribute may be a generator, hold some (a list, tuple, set or dict, of which the first 32 elements are looked
    at), or be a function or bound method that draws from some: its arguments, closure and the globals that it names
    are looked at too.

    This finds the ways in which samplers are written. It proves nothing: a generator that is reached by a property, an
    object of the user's, another module or a deeper nest stays unseen. So who asks may restore what was found, and may
    not conclude that nothing else is drawn from.
    """
    found: dict[int, RandomGenerator] = {}
    for holder in holders:
        for value in getattr(holder, "__dict__", {}).values():
            found |= {id(rng): rng for rng in _within(value, _DEPTH)}
    return list(found.values())


def _within(value: Any, depth: int) -> Iterator[RandomGenerator]:
    """Yield the random generators that a value is, holds, or is a function of."""
    parts: Iterable[Any] = ()
    match value:
        case random.SystemRandom():
            pass  # which has no state
        case torch.Generator() | np.random.Generator() | np.random.RandomState() | random.Random():
            yield value
        case partial():
            parts = (value.func, *value.args, *value.keywords.values())
        case MethodType() | BuiltinMethodType():  # the latter is what numpy 1.26's methods are
            parts = (value.__self__,)
        case FunctionType():
            names = set(value.__code__.co_names) & value.__globals__.keys()
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            parts = (*cells, *(value.__defaults__ or ()), *(value.__globals__[name] for name in names))
        case dict():
            parts = islice(value.values(), LOOKED_AT)
        case list() | tuple() | set():
            parts = islice(value, LOOKED_AT)
    for part in parts if depth else ():
        yield from _within(part, depth - 1)


def generator_states(holders: Iterable[object]) -> Sequence[Any]:
    """Return the states of the holders' random generators."""
    return [generator_state(generator) for generator in random_generators(holders)]


def set_generator_states(holders: Iterable[object], states: Sequence[Any]) -> None:
    """Put the holders' random generators into states that ``generator_states`` returned."""
    for generator, state in zip(random_generators(holders), states, strict=True):
        set_generator_state(generator, state)


@contextmanager
def unmoved(generators: Iterable[RandomGenerator]) -> Iterator[None]:
    """Put the generators back, afterwards, into the states that they have now."""
    before = [(generator, generator_state(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            set_generator_state(generator, state)


def generator_state(generator: RandomGenerator) -> Any:
    """Return a generator's state, in numbers, strings, lists and dicts."""
    match generator:
        case torch.Generator():
            return base64.b64encode(generator.get_state().numpy().tobytes()).decode()
        case np.random.Generator():
            return plain(generator.bit_generator.state)
        case np.random.RandomState():
            return plain(generator.get_state(legacy=False))
        case _:
            return plain(generator.getstate())


def set_generator_state(generator: RandomGenerator, state: Any) -> None:
    """Put a generator into a state that ``generator_state`` returned for one of its kind."""
    match generator:
        case torch.Generator():
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState():
            generator.set_state(state)
        case _:
            version, internal, gauss = state
            generator.setstate((version, tuple(internal), gauss))


def plain(value: Any) -> Any:
    """Return a state in numbers, strings, lists and dicts."""
    match value:
        case dict():
            return {key: plain(part) for key, part in value.items()}
        case tuple():
            return [plain(part) for part in value]
        case np.ndarray():
            return value.tolist()
    return value
