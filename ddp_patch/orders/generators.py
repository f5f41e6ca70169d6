"""Find, read and restore random generators in objects, and counters. The global ones are in ``random_states.py``."""

import base64
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_patch.walks import LOOKED_AT, elements, stored

__all__ = [
    "RandomGenerator",
    "changed_attributes",
    "generator_state",
    "generator_states",
    "is_stateful",
    "native_state",
    "plain",
    "plain_attributes",
    "random_generators",
    "same_state",
    "seeded_anew",
    "set_generator_state",
    "set_generator_states",
    "set_native_state",
    "torch_generators",
    "torch_seed",
    "was_seeded",
]


RandomGenerator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

# What counts of a sampler are: these types, and no subclass, as numpy's numbers are.
_PLAIN = {bool, int, float, str, type(None)}
# The global ones. ``random.shuffle`` and ``numpy.random.shuffle`` are methods of them.
_GLOBAL = (
    torch.default_generator,
    *(getattr(draw, "__self__", None) for draw in (random.random, np.random.random_sample)),
)
# What others draw from, or what holds everything.
_OTHERS = (type, ModuleType, Dataset, DataLoader, nn.Module, nn.Parameter)
# Packages whose classes draw from their instances' attributes alone.
_LIBRARIES = frozenset({"builtins", "collections", "ddp_patch", "numpy", "torch", "torchdata", "typing"})


def torch_generators(holders: Iterable[object]) -> list[torch.Generator]:
    """Return the ``torch.Generator`` objects that the holders draw from, each once."""
    return [generator for generator in random_generators(holders) if isinstance(generator, torch.Generator)]


def random_generators(holders: Iterable[object]) -> list[RandomGenerator]:
    """Return the random generators in the holders' attributes, and in what these hold directly, each once.

    An attribute may be a generator, a list, tuple, set or dict of some (its first 32 elements are looked at), an object
    of the user's that has some as attributes, a bound method of these, or a ``partial`` with some as arguments. The
    global generators do not count. What a function draws from by its globals or closure is not found, nor are a class's
    own attributes: ranks compare what they draw.
    """
    found = {id(part): part for holder in holders for part in _held(holder) if _is_generator(part)}
    return list(found.values())


def _held(holder: object) -> Iterator[Any]:
    """Yield a holder's attributes, and what these hold."""
    for value in stored(holder).values():
        held = value.__self__ if isinstance(value, MethodType | BuiltinMethodType) else value
        yield held
        yield from islice(_parts(held), LOOKED_AT)


def _parts(value: Any) -> Iterable[Any]:
    """Return what a value holds: a container, a partial, or an object of the user's."""
    if isinstance(value, partial):
        return (getattr(value.func, "__self__", None), *value.args, *value.keywords.values())
    is_users = type(value).__module__.partition(".")[0] not in _LIBRARIES and not isinstance(value, _OTHERS)
    return stored(value).values() if is_users else elements(value)


def _is_generator(value: object) -> bool:
    is_global = any(value is generator for generator in _GLOBAL)
    return isinstance(value, RandomGenerator) and not is_global and not isinstance(value, random.SystemRandom)


def generator_states(holders: Iterable[object]) -> Sequence[Any]:
    """Return the states of the holders' random generators."""
    return [generator_state(generator) for generator in random_generators(holders)]


def set_generator_states(holders: Iterable[object], states: Sequence[Any]) -> None:
    """Put the holders' random generators into states that ``generator_states`` returned."""
    for generator, state in zip(random_generators(holders), states, strict=True):
        set_generator_state(generator, state)


def generator_state(generator: RandomGenerator) -> Any:
    """Return a generator's state, in numbers, strings, lists and dicts."""
    state = native_state(generator)
    return base64.b64encode(state.numpy().tobytes()).decode() if isinstance(state, torch.Tensor) else plain(state)


def set_generator_state(generator: RandomGenerator, state: Any) -> None:
    """Put a generator into a state that ``generator_state`` returned for one of its kind."""
    match state:
        case str():
            state = torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
        case version, internal, gauss:
            state = version, tuple(internal), gauss
    set_native_state(generator, state)


def native_state(generator: RandomGenerator) -> Any:
    """Return a generator's state as it says it, which takes the least time."""
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
        case _:
            return generator.getstate()


def set_native_state(generator: RandomGenerator, state: Any) -> None:
    """Put a generator into a state that ``native_state`` returned for one of its kind."""
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case torch.Generator() | np.random.RandomState():
            generator.set_state(state)
        case _:
            generator.setstate(state)


def same_state(state: Any, other: Any) -> bool:
    """Return whether two states that ``native_state`` returned are the same."""
    match state:
        case torch.Tensor():
            return isinstance(other, torch.Tensor) and torch.equal(state, other)
        case np.ndarray():
            return np.array_equal(state, other)
        case dict():
            return state.keys() == other.keys() and all(same_state(value, other[name]) for name, value in state.items())
    return bool(state == other)


def was_seeded(generator: RandomGenerator, before: Any) -> bool:
    """Return whether somebody has seeded a generator since its state was ``before``, and not only drawn from it.

    Only torch's know their seed. Of others it is not known, so what a sampler's ``set_epoch`` does counts instead.
    """
    if not isinstance(generator, torch.Generator):
        return False
    seed, other = generator.initial_seed(), torch.Generator(generator.device)
    if seed != other.set_state(before).initial_seed():
        return True
    return same_state(generator.get_state(), other.manual_seed(seed).get_state())


def seeded_anew(generator: RandomGenerator, state: Any, *key: int) -> Any:
    """Return the state of a generator of this kind that is seeded by a state and a key; the generator stays put."""
    told = hashlib.blake2b(repr((plain(state), key)).encode(), digest_size=16).digest()
    seed = np.random.SeedSequence(int.from_bytes(told, "little"))
    match generator:
        case torch.Generator():
            other = torch.Generator(generator.device)
            return other.manual_seed(torch_seed(seed)).get_state()
        case np.random.Generator():
            return type(generator.bit_generator)(seed).state
        case np.random.RandomState():
            return np.random.RandomState(seed.generate_state(4)).get_state(legacy=False)
        case _:
            return random.Random(int.from_bytes(told, "little")).getstate()


def torch_seed(sequence: np.random.SeedSequence) -> int:
    """Return a seed for torch, of 63 bits: a DataLoader's own seeds are int64, and users pass them on."""
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def plain(value: Any) -> Any:
    """Return a state in numbers, strings, lists and dicts."""
    match value:
        case dict():
            return {key: plain(part) for key, part in value.items()}
        case tuple():
            return [plain(part) for part in value]
        case np.ndarray() | torch.Tensor():
            return value.tolist()
    return value


def is_stateful(holder: object) -> bool:
    """Return whether a sampler has torch's Stateful protocol."""
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")


def changed_attributes(holder: object, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a sampler's ``plain_attributes`` that differ from what they were before."""
    now = plain_attributes(holder).items()
    return {name: value for name, value in now if name not in before or before[name] != value}


def plain_attributes(holder: object) -> dict[str, Any]:
    """Return the numbers and strings that are attributes of a sampler without a ``state_dict``."""
    if is_stateful(holder):
        return {}
    return {
        name: value
        for name, value in getattr(holder, "__dict__", {}).items()
        if type(value) in _PLAIN and not (name == "epoch" and hasattr(holder, "set_epoch"))  # set_epoch() sets it
    }
