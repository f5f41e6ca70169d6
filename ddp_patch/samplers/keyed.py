"""The base of these samplers: passes that are keyed by seed and epoch, their states; a scalable shuffle; iterations."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from ddp_patch.errors import SamplerError
from ddp_patch.loaders.samples import tell_epoch
from ddp_patch.orders.chunks import IterationProgress
from ddp_patch.orders.orders import Permutation, blocks, is_random_access
from ddp_patch.orders.random_states import EpochCounter, shuffle_key
from ddp_patch.samplers.checks import randomness, whole

__all__ = [
    "At",
    "CountingSampler",
    "IterationBatchSampler",
    "KeyedSampler",
    "LatestEpoch",
    "Positions",
    "ResumableSampler",
    "ScalableRandomSampler",
    "check_names",
    "check_number",
    "generator_of",
    "named_state",
    "taken_from",
]

T = TypeVar("T")
Epoch = TypeVar("Epoch")


# Raise this number when states get other contents, or when an epoch's order changes.
_VERSION = 1


def named_state(sampler: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the sampler's kind and the version in it.

    Examples:
        >>> named_state(range(3), {"taken": 2})
        {'kind': 'range', 'version': 1, 'taken': 2}
    """
    return {"kind": type(sampler).__name__, "version": _VERSION, **values}


def check_names(sampler: object, state: Mapping[str, Any], names: set[str]) -> None:
    """Raise SamplerError unless a state has this sampler's kind and version, and exactly these names."""
    name = type(sampler).__name__
    if not isinstance(state, Mapping) or state.get("kind") != name:
        kind = state.get("kind", "nothing named") if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise SamplerError(
            f"{name}.load_state_dict() was given the state of {kind}, which another kind of sampler saved. Pass what "
            f"the state_dict() of a {name} returned."
        )
    if state.get("version") != _VERSION:
        raise SamplerError(
            f"{name}.load_state_dict() was given version {state.get('version')!r} and reads {_VERSION}: the order of "
            "an epoch may differ. Use the version of ddp_patch that saved it, or begin the epoch again."
        )
    if differing := sorted(names ^ state.keys()):
        raise SamplerError(
            f"{name}.load_state_dict() was given {sorted(state)} and needs {sorted(names)}: "
            f"{', '.join(differing)} is in only one of them, as when one sampler was given generator= and the other "
            "was not. Make the sampler with the arguments of the one that was saved."
        )


def check_number(sampler: object, name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise SamplerError unless a number in a state lies in the range that the sampler can have saved."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole and least <= value and (most is None or value <= most)):  # type: ignore[operator]  # a whole one
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise SamplerError(
            f"{type(sampler).__name__} cannot resume from a state with {name}={value!r}: it must be a whole number, "
            f"{bounds}. Pass what the state_dict() of a sampler with the same arguments returned."
        )


Positions: TypeAlias = npt.NDArray[np.int64]
# An epoch, as a function that returns the items at any of its positions.
At: TypeAlias = Callable[[Positions], Sequence[Any] | npt.NDArray[Any]]


class ResumableSampler(Sampler[T]):
    """A sampler whose pass can be stopped and resumed, in this process or another.

    A subclass implements ``_begin``, which begins a pass and returns its items in parts. It also implements ``_state``,
    ``_check_state`` and ``_load_state`` for all that a pass follows from, except how many items were taken.
    """

    _count = "taken"  # the name in a state for how far the pass has come
    _first = 0  # where that count begins
    _block = 4096  # how many items are looked up at once, at most
    _progress: IterationProgress | None = None  # of the latest pass
    _skip = 0  # where the next pass begins

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Iterator[T]]:
        """Yield a pass in parts, and draw nothing before the first item is asked for, as torch's samplers do."""
        skip, self._skip = self._skip, self._first
        parts = self._begin(skip)
        self._progress = progress = IterationProgress(skip)
        for part in parts:
            yield progress.give(part)
        progress.end()

    def _begin(self, skip: int) -> Iterator[Sequence[Any]]:
        raise NotImplementedError

    def _looked_up(self, at: At, skip: int, length: int) -> Iterator[Sequence[Any]]:
        """Look an epoch's items up in parts, from position ``skip`` on."""
        self._require_count(skip, length)
        parts = (at(np.arange(run.start, run.stop)) for run in blocks(range(skip, length), self._block))
        return (found.tolist() if isinstance(found, np.ndarray) else found for found in parts)

    @property
    def _is_running(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._progress is not None and not self._progress.is_ended

    def _leave(self) -> None:
        """Forget the pass that is running or was loaded, so that the next one begins at its first item."""
        self._progress, self._skip = None, self._first

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest pass, as plain values.

        The state counts the items taken from this sampler, and a ``DataLoader`` with workers takes them ahead of the
        training. In a patched loader, save the state of that loader's own sampler instead.
        """
        if self._progress is None or self._progress.is_ended:
            return self.state_between_passes()
        return named_state(self, {self._count: self._progress.items_taken, **self._state(in_pass=True)})

    def state_between_passes(self) -> dict[str, Any]:
        """Return the state from which the next pass begins, as if a pass that is running were left."""
        return named_state(self, {self._count: self._skip, **self._state(in_pass=False)})

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        """Return what the running pass follows from if ``in_pass``, else what the next one follows from."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next pass resume where a sampler with the same arguments was saved.

        ``len()`` stays the length of a whole pass.

        Args:
            state_dict: What ``state_dict()`` returned.

        Raises:
            SamplerError: The state is damaged or belongs to something else. Nothing has changed then.
        """
        check_names(self, state_dict, set(self.state_between_passes()))
        self._require_count(state_dict[self._count])
        self._check_state(state_dict)
        self._leave()
        self._load_state(state_dict)
        self._skip = state_dict[self._count]

    def _require_count(self, taken: object, most: int | None = None) -> None:
        check_number(self, self._count, taken, self._first, most)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise SamplerError unless ``_load_state`` can load the state."""
        raise NotImplementedError

    def _load_state(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


class CountingSampler(ResumableSampler[T]):
    """A resumable sampler that counts its own epochs."""

    def __init__(self) -> None:
        self.epochs: EpochCounter = EpochCounter()

    @property
    def epoch(self) -> int:
        """The current epoch; before the first pass, the next one."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. If this is never called, each pass that draws an item is the next epoch's."""
        before = None if self._is_running else self.epochs.upcoming
        self.epochs.set(whole("epoch", epoch, 0, "an epoch's order is derived from its number"))
        if self.epochs.upcoming != before:  # the same epoch again keeps a pass that was loaded
            self._leave()

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        return {"epoch": self.epochs.current if in_pass else self.epochs.upcoming}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        check_number(self, "epoch", state["epoch"], 0)

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.epochs.set(state["epoch"])


def generator_of(key: np.random.SeedSequence) -> np.random.Generator:
    """Return a generator that draws the same numbers from the same key in every version of numpy.

    Examples:
        >>> generator_of(np.random.SeedSequence(7)).integers(100, size=3).tolist()
        [94, 62, 68]
    """
    return np.random.Generator(np.random.PCG64(key))  # default_rng() may choose another bit generator one day


def taken_from(order: npt.NDArray[np.integer[Any]], positions: Positions) -> npt.NDArray[np.int64]:
    """Return the items at some positions of an order, which may hold them in fewer bytes.

    Examples:
        >>> taken_from(np.array([4, 3, 5], np.int16), np.array([2, 0])).tolist()
        [5, 4]
    """
    return np.take(order, positions, axis=0).astype(np.int64)


class LatestEpoch(Generic[Epoch]):
    """Keeps the latest epoch, so that an epoch is drawn once however often it is looked up.

    Examples:
        >>> latest = LatestEpoch[str]()
        >>> latest.of(3, lambda: "drawn"), latest.of(3, lambda: "drawn again")
        ('drawn', 'drawn')
    """

    def __init__(self) -> None:
        self._kept: tuple[int, Epoch] | None = None

    def of(self, epoch: int, draw: Callable[[], Epoch]) -> Epoch:
        """Return the epoch with this number, and draw it unless it is the latest."""
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, draw()
        return self._kept[1]


class KeyedSampler(CountingSampler[T]):
    """A sampler whose every epoch follows from one key.

    The key is made of ``seed`` and the epoch. Without ``seed``, a pass draws one number from ``generator``, or from
    torch's global generator, as torch's ``RandomSampler`` does. A subclass implements ``_order`` and ``__len__``.

    Attributes:
        seed: Every epoch's order follows from it; None if orders are drawn.
        generator: A pass draws its key from it; None for torch's global generator.
    """

    def __init__(self, seed: int | None, generator: torch.Generator | None) -> None:
        super().__init__()
        self.seed: int | None = randomness(seed, generator)
        self.generator = generator
        self._drawn: int | None = None  # the running pass's number
        self._to_come: int | None = None  # the number of a pass that was loaded and has not begun
        self._latest = LatestEpoch[At]()

    def __len__(self) -> int:
        raise NotImplementedError

    def _order(self, key: np.random.SeedSequence) -> At:
        raise NotImplementedError

    @property
    def has_random_access(self) -> bool:
        """Whether any part of any epoch can be looked up, which needs ``seed``."""
        return self.seed is not None

    def items_at(self, positions: Positions, epoch: int) -> Any:
        """Return the items at some positions of an epoch.

        Args:
            positions: In ``range(len(self))``, in any order and number.
            epoch: From 0.

        Returns:
            The items, in the order of the positions: indices as an array of the shape ``(positions,)``, batches as an
            array of the shape ``(positions, batch_size)`` or as a list of lists.

        Raises:
            SamplerError: There is no ``seed``, so an epoch's number does not say its order.
        """
        if self.seed is None:
            raise SamplerError(
                f"{type(self).__name__}.items_at() was called without a seed: the order of epoch {epoch} then follows "
                "from what generators draw, not from its number. Pass seed=, or iterate the sampler."
            )
        return self._epoch(self.seed, epoch)(positions)

    def _epoch(self, seed: int, epoch: int) -> At:
        return self._latest.of(epoch, lambda: self._order(shuffle_key(seed, epoch)))

    def _begin(self, skip: int) -> Iterator[Sequence[Any]]:
        self.epochs.begin(self.epochs.upcoming)
        return self._looked_up(self._order_of_pass(), skip, len(self))

    def _order_of_pass(self) -> At:
        """Return the order of the pass that begins, and draw its number if there is no seed."""
        if self.seed is not None:
            return self._epoch(self.seed, self.epochs.current)
        loaded, self._to_come = self._to_come, None
        drawn = torch.empty((), dtype=torch.int64).random_(generator=self.generator) if loaded is None else loaded
        self._drawn = int(drawn)
        return self._order(shuffle_key(self._drawn, 0))

    def _leave(self) -> None:
        super()._leave()
        self._to_come = None

    def state_of_latest_pass(self) -> dict[str, Any]:
        """Return the state at the beginning of the latest pass, with the number that the pass drew."""
        if self._progress is None:  # a subclass iterates in its own way
            return self.state_between_passes()
        return named_state(self, {self._count: self._progress.skip, **self._state(in_pass=True)})

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        state = super()._state(in_pass=in_pass) | {
            "drawn": self._drawn if in_pass else self._to_come,
            "seed": self.seed,
        }
        return state if self.generator is None else {**state, "generator": self.generator.get_state()}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        self._require_count(state[self._count], len(self))
        if state["drawn"] is not None:
            check_number(self, "drawn", state["drawn"], 0)
        if state["seed"] != self.seed:
            raise SamplerError(
                f"{type(self).__name__}.load_state_dict() was given a state of seed={state['seed']!r} and has "
                f"seed={self.seed!r}, so the order differs. Make the sampler with the seed of the one that was saved."
            )

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        self._to_come = state["drawn"]
        if self.generator is not None:
            self.generator.set_state(state["generator"])


class ScalableRandomSampler(KeyedSampler[int]):
    """Shuffle ``range(n)`` in constant memory: each item is computed when it is needed.

    Args:
        n: How many samples there are, from 0 to 2**63 - 1.
        seed: Every epoch's order follows from it and the epoch's number.
        generator: Used if there is no seed: each pass draws one number from it, or else from torch's global generator.

    Raises:
        SamplerError: ``n`` is no such number, or ``seed`` and ``generator`` are both given.

    Examples:
        >>> sampler = ScalableRandomSampler(10**12, seed=0)
        >>> first = next(iter(sampler))
        >>> first == sampler.items_at(np.array([0]), epoch=0).item()
        True
    """

    _block = 2**16  # the permutation takes some hundred numpy calls for however few positions

    def __init__(self, n: int, *, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        super().__init__(seed, generator)
        self.n: int = whole("n", n, 0, "it is the number of samples to shuffle", bits=63)

    def __len__(self) -> int:
        return self.n

    def _order(self, key: np.random.SeedSequence) -> At:
        return Permutation(self.n, key)


class IterationBatchSampler(CountingSampler[list[int]]):
    """Yield a fixed number of batches, from as many epochs of a batch sampler as that takes.

    Before each epoch, the wrapped samplers that have a ``set_epoch`` get the epoch's number. A stopped training resumes
    at the batch that would have come next. If the wrapped batch sampler can be looked up, as those of
    ``ddp_patch.samplers`` with a seed can, the epochs before are skipped. Otherwise they are drawn again, so the
    generators they are drawn from must be in the states in which the training began.

    One pass is one training, and its number is this sampler's epoch. No two trainings share an epoch of the wrapped
    samplers.

    In a patched loader, all ranks together get ``num_iterations`` batches. For as many steps on each rank, multiply by
    the number of ranks.

    Args:
        batch_sampler: A batch sampler, or any iterable of batches that can be iterated again.
        num_iterations: How many iterations the training has, those before ``start_iteration`` included.
        start_iteration: The first iteration, from 0.

    Raises:
        SamplerError: ``start_iteration`` is past ``num_iterations``, an argument is of another kind, or, while drawing,
            an epoch has no batch.

    Examples:
        >>> list(IterationBatchSampler([[0, 1], [2]], num_iterations=5))
        [[0, 1], [2], [0, 1], [2], [0, 1]]
        >>> list(IterationBatchSampler([[0, 1], [2]], num_iterations=5, start_iteration=3))
        [[2], [0, 1]]

    Source:
        maskrcnn-benchmark's ``IterationBasedBatchSampler``.
    """

    sets_nested_epochs = True  # so that no wrapper sets the epochs of the wrapped samplers
    _count = "iteration"

    def __init__(self, batch_sampler: Iterable[list[int]], num_iterations: int, start_iteration: int = 0) -> None:
        super().__init__()
        self.batch_sampler = batch_sampler
        self.num_iterations: int = whole("num_iterations", num_iterations, 1, "a training needs at least one")
        self.start_iteration: int = whole("start_iteration", start_iteration, 0, "the training begins there")
        if self.start_iteration > self.num_iterations:
            raise SamplerError(
                f"start_iteration={start_iteration} is past num_iterations={num_iterations}: nothing would be left. "
                "Pass a later end, or an earlier start."
            )
        self._first = self._skip = self.start_iteration

    def __len__(self) -> int:
        return self.num_iterations - self.start_iteration

    def _begin(self, skip: int) -> Iterator[Sequence[list[int]]]:
        self.epochs.begin(self.epochs.upcoming)
        batches = self._batches(self.epochs.current, skip)
        return ([batch] for batch in islice(batches, self.num_iterations - skip))

    def _batches(self, training: int, left_out: int) -> Iterator[list[int]]:
        """Yield a training's batches without end, and leave out the first ones."""
        sampler: Any = self.batch_sampler
        # Every epoch has a batch at least, so a training needs at most `num_iterations` epochs.
        for epoch in count(training * self.num_iterations):
            tell_epoch(sampler, epoch)
            if is_random_access(sampler) and 0 < len(sampler) <= left_out:
                left_out -= len(sampler)
                continue
            given = 0
            for given, batch in enumerate(sampler, start=1):
                if given > left_out:
                    yield batch
            if not given:
                raise SamplerError(
                    f"Epoch {epoch} of {type(sampler).__name__} has no batch, so {self.num_iterations} iterations are "
                    "never reached. Pass a batch sampler that gives some each time it is iterated, not an iterator."
                )
            left_out = max(0, left_out - given)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        self._require_count(state[self._count], self.num_iterations)
