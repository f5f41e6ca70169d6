"""Find, read and restore random generators in objects, and counters. The global ones are in ``random_states.py``."""

import base64
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_patch.walks import LOOKED_AT, elements, stored, walk

__all__ = [
    "RandomGenerator",
    "changed_attributes",
    "generator_state",
    "generator_states",
    "generators_restored",
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
# How deep generators are looked for: an attribute, what it holds, what that holds, and once more.
_DEPTH = 3
# The global ones. ``random.shuffle`` and ``numpy.random.shuffle`` are methods of them.
_GLOBAL = (
    torch.default_generator,
    *(getattr(draw, "__self__", None) for draw in (random.random, np.random.random_sample)),
)
# So many objects are looked at.
_IN_ALL = 2048
# What others draw from, or what holds everything.
_OTHERS = (type, ModuleType, Dataset, DataLoader, nn.Module, nn.Parameter)
# Packages whose classes draw from their instances' attributes alone.
_LIBRARIES = frozenset({"builtins", "collections", "ddp_patch", "numpy", "torch", "torchdata", "typing"})


def torch_generators(holders: Iterable[object]) -> list[torch.Generator]:
    """Return the ``torch.Generator`` objects that the holders draw from, each once."""
    return [generator for generator in random_generators(holders) if isinstance(generator, torch.Generator)]


def random_generators(holders: Iterable[object]) -> list[RandomGenerator]:
    """Return the random generators that can be found in the holders' attributes, each once.

    An attribute may be a generator, hold some (a list, tuple, set or dict, of which the first 32 elements are looked
    at, or an object of the user's that is no dataset, module or loader), or be a function or bound method that draws
    from some: its arguments, closure and the globals that it names are looked at too. So are the methods and
    attributes of the holder's own class. The global generators do not count.

    This finds the ways in which samplers are written. It proves nothing: a generator in another module or a deeper nest
    stays unseen. So who asks may restore what was found, and may not conclude that nothing else is drawn from.
    """
    found: dict[int, RandomGenerator] = {}
    for holder in holders:
        seen = dict[int, int]()
        for value in chain(stored(holder).values(), _written(type(holder))):
            found |= {id(generator): generator for generator in _within(value, _DEPTH, seen)}
    return [generator for generator in found.values() if not any(generator is state for state in _GLOBAL)]


def _written(kind: type) -> Iterator[Any]:
    """Yield what somebody wrote in a class: methods, whose globals it may draw from, and attributes."""
    for base in kind.__mro__:
        if _is_users(base):
            yield from vars(base).values()


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def _names(code: CodeType) -> set[str]:
    """Return the global names that a function uses, also in its comprehensions and inner functions."""
    functions = walk(code, lambda outer: [part for part in outer.co_consts if isinstance(part, CodeType)])
    return set().union(*(function.co_names for function in functions))


def _within(value: Any, depth: int, seen: dict[int, int]) -> Iterator[RandomGenerator]:
    """Yield the random generators that a value is, holds, or is a function of; but for what was seen as deeply."""
    if seen.get(id(value), -1) >= depth or len(seen) >= _IN_ALL:
        return
    seen[id(value)] = depth
    if isinstance(value, RandomGenerator):
        if not isinstance(value, random.SystemRandom):  # which has no state
            yield value
        return
    for part in _parts(value) if depth else ():
        yield from _within(part, depth - 1, seen)


def _parts(value: Any) -> Iterable[Any]:
    """Return what a value holds, or draws from if it is a function."""
    match value:
        case partial():
            return (value.func, *value.args, *value.keywords.values())
        case MethodType() | BuiltinMethodType():  # the latter is what numpy 1.26's methods are
            return (value.__self__,)
        case FunctionType():
            names = sorted(_names(value.__code__) & value.__globals__.keys())
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            return (*cells, *(value.__defaults__ or ()), *(value.__globals__[name] for name in names))
        case _ if _is_users(type(value)) and not isinstance(value, _OTHERS):
            return islice(stored(value).values(), LOOKED_AT)
    return islice(elements(value), LOOKED_AT)


def generator_states(holders: Iterable[object]) -> Sequence[Any]:
    """Return the states of the holders' random generators."""
    return [generator_state(generator) for generator in random_generators(holders)]


def set_generator_states(holders: Iterable[object], states: Sequence[Any]) -> None:
    """Put the holders' random generators into states that ``generator_states`` returned."""
    for generator, state in zip(random_generators(holders), states, strict=True):
        set_generator_state(generator, state)


@contextmanager
def generators_restored(generators: Iterable[RandomGenerator]) -> Iterator[Callable[[], bool]]:
    """Put generators back, afterwards, into their states of now; yield what tells whether any was drawn from."""
    before = [(generator, native_state(generator)) for generator in generators]
    try:
        yield lambda: not all(same_state(native_state(generator), state) for generator, state in before)
    finally:
        for generator, state in before:
            set_native_state(generator, state)


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

    PCG64 and Philox show it by a constant that drawing keeps, so not if the seed is the same; Philox and a Mersenne
    Twister by a state that only seeding makes.
    """
    if isinstance(generator, torch.Generator):
        seed, other = generator.initial_seed(), torch.Generator(generator.device)
        if seed != other.set_state(before).initial_seed():
            return True
        return same_state(generator.get_state(), other.manual_seed(seed).get_state())
    state = native_state(generator)
    if isinstance(state, tuple):
        return _is_as_seeded(state[1][0], state[1][1], state[1][-1])
    words = state["state"]
    if "pos" in words:
        return _is_as_seeded(int(words["key"][0]), int(words["key"][1]), words["pos"])
    if "counter" in words and not np.any(words["counter"]):
        return True
    return any(not same_state(words.get(name), before["state"].get(name)) for name in ("inc", "key"))


def _is_as_seeded(first: int, second: int, place: int) -> bool:
    """Return whether a Mersenne Twister's words are as seeding makes them.

    Source: ``init_genrand`` and ``init_by_array`` of Matsumoto and Nishimura's mt19937ar; numpy's ``MT19937`` begins a
    word earlier.
    """
    of_number = (1812433253 * (first ^ first >> 30) + 1) % 2**32
    return (first == 2**31 and place >= 623) or (second == of_number and place == 624)


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
