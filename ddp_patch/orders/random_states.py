"""Random states: of the generators that objects hold, and of the three global generators; and the seeds of both.

The three *global* generators are torch's on the CPU, numpy's and Python's. Samplers and training both draw from them.
Two context managers keep samplers from disturbing training. ``PrivateRNG`` has random states of an epoch's own, which
go on whenever it is entered. ``look`` puts the global states back when it is left, as if nothing had been drawn.
"""

import base64
import copy
import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import BuiltinMethodType, MappingProxyType, MethodType, ModuleType
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_patch.compat.private_packages import may_hold_a_normal
from ddp_patch.compat.private_torch import replace_worker_seed
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.walks import LOOKED_AT, elements, stored

# ---- generators that objects hold, and counters ----

RandomGenerator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

# The types of plain attributes. Subclasses, such as numpy's numbers, are left out.
_PLAIN = {bool, int, float, str, type(None)}
# The global generators. ``random.shuffle`` and ``numpy.random.shuffle`` are methods of two of them.
_GLOBAL = (
    torch.default_generator,
    *(getattr(draw, "__self__", None) for draw in (random.random, np.random.random_sample)),
)
# Types whose objects are shared with other code, or refer to everything.
_SHARED = (type, ModuleType, Dataset, DataLoader, nn.Module, nn.Parameter)
# Packages whose objects are not searched for generators, because their classes only draw from their own attributes.
_LIBRARIES = frozenset({"builtins", "collections", "ddp_patch", "numpy", "torch", "torchdata", "typing"})


def random_generators(holders: Iterable[object]) -> list[RandomGenerator]:
    """Return the random generators in the holders' attributes, and one level deeper, each once.

    An attribute may be a generator; a list, tuple, set or dict with generators among its first 32 elements; an object
    of the user's with generators as attributes; a bound method of a generator or of such an object; or a ``partial``
    with generators as arguments. Global generators are left out. Generators in a function's globals or closure, or in a
    class's own attributes, are not found. If they differ between ranks, the comparison of drawn items shows it.
    """
    found = {id(part): part for holder in holders for part in _held(holder) if _is_generator(part)}
    return list(found.values())


def _held(holder: object) -> Iterator[Any]:
    """Yield a holder's attributes, and the parts of each attribute."""
    for value in stored(holder).values():
        held = value.__self__ if isinstance(value, MethodType | BuiltinMethodType) else value
        yield held
        yield from islice(_parts(held), LOOKED_AT)


def _parts(value: Any) -> Iterable[Any]:
    """Return the elements of a container, the arguments of a ``partial``, or the attributes of a user's object."""
    if isinstance(value, partial):
        return (getattr(value.func, "__self__", None), *value.args, *value.keywords.values())
    return stored(value).values() if is_users(value) else elements(value)


def is_users(value: object) -> bool:
    """Return whether an object is of a user's class, and not of a type whose objects are shared with other code."""
    return type(value).__module__.partition(".")[0] not in _LIBRARIES and not isinstance(value, _SHARED)


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
    """Return a generator's state, in numbers, strings, lists and dicts. Equal states draw the same numbers."""
    state = _raw_state(generator)
    return base64.b64encode(state.numpy().tobytes()).decode() if isinstance(state, torch.Tensor) else _plain(state)


def set_generator_state(generator: RandomGenerator, state: Any) -> None:
    """Put a generator into a state that ``generator_state`` returned for a generator of the same type."""
    match generator:
        case torch.Generator():
            state = torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
        case random.Random():
            state = _in_tuples(state)
    _set_raw_state(generator, state)


def _raw_state(generator: RandomGenerator) -> Any:
    """Return a generator's state in the format of its own methods."""
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
        case _:
            return generator.getstate()


def _set_raw_state(generator: RandomGenerator, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState():
            generator.set_state(state)
        case _:
            generator.setstate(state)


def _plain(value: Any) -> Any:
    """Return a state in numbers, strings, lists and dicts."""
    match value:
        case dict():
            return {key: _plain(part) for key, part in value.items()}
        case tuple():
            return [_plain(part) for part in value]
        case np.ndarray():
            return value.tolist()
    return value


def _in_tuples(state: Any) -> Any:
    """Return a state of a Python generator with tuples for lists, as its ``setstate`` needs them."""
    return tuple(map(_in_tuples, state)) if isinstance(state, list) else state


def seeded_anew(generator: RandomGenerator, state: Any, *key: int) -> Any:
    """Return the state of a new generator of the same type, which is seeded by a state and a key."""
    number = int.from_bytes(hashlib.blake2b(repr((state, key)).encode(), digest_size=16).digest(), "little")
    seed = np.random.SeedSequence(number)
    other: RandomGenerator
    match generator:
        case torch.Generator():
            other = torch.Generator(generator.device).manual_seed(torch_seed(seed))
        case np.random.Generator():
            other = np.random.Generator(type(generator.bit_generator)(seed))
        case np.random.RandomState():
            other = np.random.RandomState(seed.generate_state(4))
        case _:
            other = copy.copy(generator)  # its class may be the user's
            other.seed(number)
    return generator_state(other)


def torch_seed(sequence: np.random.SeedSequence) -> int:
    """Return a seed for torch, of 63 bits: a DataLoader's own seeds are int64, and users pass them on."""
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def is_stateful(holder: object) -> bool:
    """Return whether a sampler has torch's Stateful protocol."""
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")


def plain_attributes(holder: object) -> dict[str, Any]:
    """Return a sampler's attributes that are numbers or strings; none if it has a ``state_dict``."""
    if is_stateful(holder):
        return {}
    return {
        name: value
        for name, value in getattr(holder, "__dict__", {}).items()
        if type(value) in _PLAIN and not (name == "epoch" and hasattr(holder, "set_epoch"))  # set_epoch() sets it
    }


# ---- seeds and epochs ----

# The uses of a seed, so that no two uses draw the same numbers.
_ORDER, _WORKER, _SHUFFLE, _LOADER, _READER, _PART, _BALANCING = range(7)


def _derive(seed: int, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=key)


def loader_seed(seed: int, stream: str, number: int) -> int:
    """Return the seed of a loader for which the user chose none.

    Args:
        seed: The seed from which the seeds of all loaders follow.
        stream: The fingerprint of the facts of the loader's stream, in hexadecimal digits.
        number: The number of the loader among those with equal streams, from 1.

    Examples:
        >>> len({loader_seed(seed, "f0", number) for seed, number in [(0, 1), (0, 2), (1, 1)]})
        3
    """
    return torch_seed(_derive(seed, _LOADER, int(stream, 16), number))


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of torch's global generator while epoch ``epoch`` is drawn.

    Examples:
        >>> sampler = torch.utils.data.RandomSampler(range(5))
        >>> _ = torch.manual_seed(epoch_seed(seed=7, epoch=2))
        >>> in_one_process = list(sampler)
        >>> from ddp_patch import DDPSamplerWrapper
        >>> patched = DDPSamplerWrapper(sampler, False, num_replicas=1, rank=0, seed=7)
        >>> patched.set_epoch(2)
        >>> list(patched) == in_one_process
        True
    """
    return torch_seed(_derive(seed, _ORDER, epoch))


def reader_seed(seed: int, epoch: int) -> int:
    """Return the seed in ``get_worker_info()`` of worker 0 while it reads a dataset. Worker j has the seed plus j.

    torch numbers the seeds of a loader's workers in this way, and datasets subtract j to get a common seed.
    """
    return torch_seed(_derive(seed, _READER, epoch)) >> 1


def shuffle_key(seed: int, epoch: int) -> np.random.SeedSequence:
    """Return the key of an epoch's order, where the order is computed, not drawn."""
    return _derive(seed, _SHUFFLE, epoch)


def balancing_key(seed: int, epoch: int, window: int) -> np.random.SeedSequence:
    """Return the key of the random order of a balanced window of an epoch."""
    return _derive(seed, _BALANCING, epoch, 0, window)


class Seed:
    """A loader's seed. All objects that derive random states share it, so that a restored state's seed holds for all.

    Args:
        value: The seed, a whole number of at least 0.
        is_chosen: Whether the user chose the seed. Then no restored state replaces it.
    """

    def __init__(self, value: int, *, is_chosen: bool) -> None:
        self.value: int = value
        self.is_chosen: bool = is_chosen


class EpochCounter:
    """The number of the latest epoch, and of the next one, which begins when a pass draws its first item.

    An iterator that draws nothing begins no epoch. A ``DataLoader`` with workers makes such an iterator for each pass.

    Attributes:
        current: The latest epoch; before the first one has begun, the upcoming epoch.
        upcoming: The epoch that the next pass will draw.
        passes: How many passes over a sharded loader have begun.
    """

    def __init__(self) -> None:
        self.current: int = 0
        self.upcoming: int = 0
        self.passes: int = 0

    def choose(self, epoch: int) -> None:
        """Make an epoch the next one."""
        self.current = self.upcoming = epoch

    def begin(self, epoch: int, *, passes: int = 1) -> None:
        """Record that an epoch begins, in so many passes: none if nothing is left of the epoch."""
        self.current, self.upcoming = epoch, epoch + 1
        self.passes += passes


def _python_seed(sequence: np.random.SeedSequence) -> int:
    return int.from_bytes(sequence.generate_state(4).tobytes(), "little")


def distributed_permutation(n: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order, of shape [n], in which ``torch.utils.data.DistributedSampler(shuffle=True)`` visits n items.

    Source: ``DistributedSampler.__iter__``: a generator seeded ``seed + epoch`` and one ``torch.randperm``.
    """
    generator = torch.Generator().manual_seed((seed + epoch) % 2**64)
    return torch.randperm(n, generator=generator)


def seed_worker(
    worker_init_fn: Callable[[int], object] | None, seed: Seed, rank: int, epochs: EpochCounter, worker_id: int
) -> None:
    """Seed torch, numpy and ``random`` in a worker by (seed, epoch, rank, worker), then call the user's function.

    torch seeds workers from a number that the main process draws. Ranks that are seeded alike, or share a generator,
    draw the same number, so all ranks would augment alike. ``get_worker_info().seed`` is replaced, too, because
    datasets seed their own generators from it.

    Args:
        worker_init_fn: The user's function, or None.
        seed: The loader's seed, which is read when a worker starts.
        rank: The rank.
        epochs: The number of the next epoch.
        worker_id: The number of the worker.

    Raises:
        UnsupportedLoaderError: The worker is a thread, not the main thread of a process.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UnsupportedLoaderError(
            f"Worker {worker_id} of the loader is a thread, and cannot be seeded by rank: threads use the same "
            "random states as the sampler, so ranks would draw different orders and lose samples. "
            "Use a loader whose workers are processes, or num_workers=0."
        )
    sequence = _derive(seed.value, _WORKER, epochs.upcoming, rank, worker_id)
    torch.manual_seed(torch_seed(sequence))
    np.random.seed(sequence.generate_state(4))
    random.seed(_python_seed(sequence))
    replace_worker_seed(torch_seed(sequence))
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


# How many seconds a thread waits for a thread that has swapped the random states.
_WAITS_S = 30.0


# All threads share the global generators. If two threads swapped states at once, each would take the other's private
# states for the states of the training. So one at a time has this lock. The names are of the loaders whose draws hold
# it, the outermost first.
_turns = threading.RLock(), list[str]()


@contextmanager
def one_at_a_time(name: str = "another loader") -> Iterator[None]:
    """While entered, let no other thread swap random states.

    Args:
        name: The loader in errors.

    Raises:
        UnsupportedLoaderError: Another thread swaps them for too long.
    """
    lock, names = _turns
    if not lock.acquire(timeout=_WAITS_S):
        other = next(iter(names), "another loader")
        raise UnsupportedLoaderError(
            f"A thread waited {_WAITS_S:.0f} s to draw from {name}, while another thread reads {other}. Both need "
            "the process's random states (torch, numpy, random), which one of them can have at a time: perhaps "
            f"{other} waits for this thread. Use workers for one of them (num_workers=1), or iterate both in one "
            "thread."
        )
    names.append(name)
    try:
        yield
    finally:
        names.pop()
        lock.release()


def _allow_swapping() -> None:
    """Replace the lock in a worker that was forked while another thread held it."""
    global _turns
    _turns = threading.RLock(), []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_allow_swapping)


@dataclass(slots=True)
class GlobalState:
    """A state of the three global generators.

    Attributes:
        installs: How often this process has installed a state. The number shows that code drew and put the state back.
    """

    installs: ClassVar[int] = 0

    torch: torch.Tensor
    numpy: np.random.BitGenerator
    numpy_gauss: dict[str, Any] | None  # the legacy state, if it holds a second normal draw
    python: tuple[Any, ...]

    @classmethod
    def capture(cls) -> "GlobalState":
        """Return the present state."""
        # numpy keeps a second normal draw beside the bit generator. Swapping bit generators would lose it.
        gauss = np.random.get_state(legacy=False) if may_hold_a_normal() else None
        bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public; numpy's stubs omit it
        return cls(torch.get_rng_state(), bit_generator, gauss, random.getstate())

    @classmethod
    def seeded(cls, sequence: np.random.SeedSequence) -> "GlobalState":
        """Return the state that follows from a seed; the present state is not changed."""
        return cls(
            torch.Generator().manual_seed(torch_seed(sequence)).get_state(),
            np.random.MT19937(sequence),
            None,
            random.Random(_python_seed(sequence)).getstate(),
        )

    def copied(self) -> "GlobalState":
        """Return a copy, which does not change while numpy draws from this state."""
        return replace(self, numpy=copy.deepcopy(self.numpy))

    def values(self) -> tuple[object, ...]:
        """Return values to compare states by: states with equal values draw the same numbers."""
        words = self.numpy.state["state"].values()
        numpy = [word.tobytes() if isinstance(word, np.ndarray) else word for word in words]
        gauss = self.numpy_gauss["gauss"] if self.numpy_gauss and self.numpy_gauss["has_gauss"] else None
        return self.torch.numpy().tobytes(), numpy, gauss, self.python

    def install(self) -> None:
        """Put the global generators into this state."""
        GlobalState.installs += 1
        torch.set_rng_state(self.torch)
        np.random.set_bit_generator(self.numpy)  # type: ignore[attr-defined]  # as get_bit_generator
        if self.numpy_gauss is not None:
            np.random.set_state(self.numpy_gauss)
        random.setstate(self.python)


class PrivateRNG:
    """A context in which the global generators, and chosen generators, draw from private states of (seed, epoch).

    The context may be entered often: the private states go on where they stopped. On leaving the context, the
    generators get their own states back.

    Args:
        seed: The loader's seed.
        epoch: The epoch.
        others: The chosen generators, and the private states that they begin with.
        name: The loader in errors.
        has_global: Whether the global generators draw from private states.

    Examples:
        >>> with PrivateRNG(seed=7, epoch=0):
        ...     first = torch.rand(1)
        >>> with PrivateRNG(seed=7, epoch=0):
        ...     again = torch.rand(1)
        >>> bool(first == again)
        True
    """

    def __init__(
        self,
        seed: int,
        epoch: int,
        others: Mapping[RandomGenerator, Any] = MappingProxyType({}),
        *,
        name: str = "another loader",
        has_global: bool = True,
    ) -> None:
        self._seed, self._name, self._has_global = seed, name, has_global
        self._key: tuple[int, ...] = _ORDER, epoch
        self._private = self._at_first() if has_global else None
        self._first: GlobalState | None = None
        self._is_entered = self._was_moved = False
        self._others: dict[RandomGenerator, Any] = {}  # private states, in the format of the generators' methods
        with one_at_a_time(name):
            for generator, state in others.items():
                found = _raw_state(generator)
                set_generator_state(generator, state)
                self._others[generator] = _raw_state(generator)
                _set_raw_state(generator, found)

    def _at_first(self) -> GlobalState:
        return GlobalState.seeded(_derive(self._seed, *self._key))

    @property
    def drew_nothing(self) -> bool:
        """Whether nothing was drawn from the private stream of the global generators."""
        if self._first is None:
            self._first = self._at_first()
        now = GlobalState.capture() if self._is_entered or self._private is None else self._private
        return not self._was_moved and now.values() == self._first.values()

    def switch_to_worker(self, reader: int) -> None:
        """Change, once, to the private states of a worker that reads a part of the epoch; at once, if entered."""
        if self._key[0] == _PART:
            return
        self._was_moved = not self.drew_nothing
        self._key, self._first = (_PART, self._key[1], reader), None
        self._private = self._at_first()
        if self._is_entered:
            self._private.install()

    def __enter__(self) -> None:
        self._turn = one_at_a_time(self._name)
        self._turn.__enter__()
        if self._private is not None:
            self._found = GlobalState.capture()
            self._private.install()
        self._others_found = {generator: _raw_state(generator) for generator in self._others}
        for generator, state in self._others.items():
            _set_raw_state(generator, state)
        self._is_entered = True

    def __exit__(self, *exc: object) -> None:
        self._is_entered = False
        for generator, state in self._others_found.items():
            self._others[generator] = _raw_state(generator)
            _set_raw_state(generator, state)
        if self._private is not None:
            self._private = GlobalState.capture()
            self._found.install()
        self._turn.__exit__(None, None, None)


@contextmanager
def look(
    generators: Iterable[RandomGenerator] = (), *, seed: int | None = None, epoch: int = 0
) -> Iterator[Callable[[], bool]]:
    """When left, restore the global and the chosen generators; yield a function that returns whether any has drawn.

    Args:
        generators: The chosen generators.
        seed: While entered, the global generators draw from the private states of this seed. With None, they go on.
        epoch: The epoch of the private states.

    Examples:
        >>> with look() as was_moved:
        ...     first, has_drawn = torch.rand(1), was_moved()
        >>> bool(first == torch.rand(1)), has_drawn
        (True, True)
    """
    with one_at_a_time():
        found, others = GlobalState.capture(), [(generator, generator_state(generator)) for generator in generators]
        looked = found.copied() if seed is None else GlobalState.seeded(_derive(seed, _ORDER, epoch))
        looked.install()
        before, installs = looked.values(), GlobalState.installs

        def was_moved() -> bool:
            # Code that draws may put the states back, so the installs count, too.
            are_same = all(generator_state(generator) == state for generator, state in others)
            return GlobalState.installs != installs or not are_same or GlobalState.capture().values() != before

        try:
            yield was_moved
        finally:
            for generator, state in others:
                set_generator_state(generator, state)
            found.install()
