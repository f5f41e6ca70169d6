"""The base class of samplers whose epochs follow from a key; checks of arguments; a scalable shuffle; iterations."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, count, islice
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from ddp_patch.errors import SamplerError
from ddp_patch.loaders.nested_samplers import tell_epoch
from ddp_patch.orders.orders import blocks, is_random_access
from ddp_patch.orders.random_states import EpochCounter, shuffle_key
from ddp_patch.validation import as_index

T = TypeVar("T")

Positions: TypeAlias = npt.NDArray[np.int64]
# An epoch, as a function that returns the items at any of its positions.
At: TypeAlias = Callable[[Positions], Sequence[Any] | npt.NDArray[Any]]


def whole(name: str, value: object, least: int, reason: str, bits: int | None = None) -> int:
    """Return a whole number as an int; raise SamplerError if the value is no whole number, too small or too large.

    Args:
        name: The argument's name.
        value: The argument.
        least: The smallest number allowed.
        reason: Why the argument must be such a number, for the error message.
        bits: The number must be less than 2**bits; None for any size.

    Examples:
        >>> whole("batch_size", np.int32(8), 1, "it is the number of samples in a batch")
        8
    """
    number = as_index(value)
    if number is None or number < least:
        raise SamplerError(f"{name}={value!r} is not a whole number of at least {least}: {reason}. Pass such an int.")
    if bits is not None and number.bit_length() > bits:
        raise SamplerError(
            f"{name}={number} is more than 2**{bits} - 1: positions are computed in 64 bits. Pass at most that."
        )
    return number


def flag(name: str, value: object) -> bool:
    """Return a bool; raise SamplerError if the value is no bool."""
    if not isinstance(value, bool):
        raise SamplerError(f"{name}={value!r} is neither True nor False. Pass one of them.")
    return value


def sequence(name: str, values: Any) -> npt.NDArray[Any] | list[Any]:
    """Return the values of all samples as an array or a list; raise SamplerError if they have no order."""
    if isinstance(values, torch.Tensor):
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True)  # numpy has no bfloat16
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, Mapping | Set) or not isinstance(values, Iterable):
        raise SamplerError(
            f"{name}={values!r} is not a sequence (type {type(values).__name__}). Pass a list, array or tensor."
        )
    return list(values)


def positive(name: str, values: Any, kinds: str, what: str) -> npt.NDArray[Any]:
    """Return finite numbers above 0 as an array, in the shape ``(samples,)``, or raise SamplerError.

    Args:
        name: The argument's name.
        values: The argument: a sequence, array or tensor.
        kinds: numpy's letters of the allowed types: "iu" for whole numbers, "iuf" for all numbers.
        what: What a value must be, for the error message.

    Examples:
        >>> positive("lengths", torch.tensor([3, 5]), "iu", "a whole number above 0")
        array([3, 5])
    """
    given = sequence(name, values)
    try:
        found = np.asarray(given)
    except ValueError:  # values of several lengths
        found = np.asarray(given, dtype=object)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in kinds:
        raise SamplerError(
            f"{name} is an array of {found.dtype} of shape {found.shape}, and each value is {what}. Pass a flat list, "
            "array or tensor with one for each sample."
        )
    if len(odd := np.flatnonzero(~((found > 0) & (found <= np.iinfo(np.int64).max)))):
        raise SamplerError(
            f"{name}[{odd[0]}]={found[odd[0]]} is not {what}, of at most 64 bits. Correct it or leave that sample out."
        )
    return found


def smallest(n: int) -> type[np.integer[Any]]:
    """Return the smallest integer type for ``range(n)``, which is the fastest to sort and look up.

    Examples:
        >>> smallest(1000)
        <class 'numpy.int16'>
    """
    return next((kind for kind in (np.int16, np.int32) if n <= np.iinfo(kind).max), np.int64)


def generator_of(key: np.random.SeedSequence) -> np.random.Generator:
    """Return a generator that draws the same numbers from the same key in every version of numpy.

    Examples:
        >>> generator_of(np.random.SeedSequence(7)).integers(100, size=3).tolist()
        [94, 62, 68]
    """
    return np.random.Generator(np.random.PCG64(key))  # default_rng() may choose another bit generator one day


class CountingSampler(Sampler[T]):
    """A sampler that counts its own epochs: each pass that draws an item begins the next epoch."""

    def __init__(self) -> None:
        self.epochs: EpochCounter = EpochCounter()

    @property
    def epoch(self) -> int:
        """The current epoch; before the first pass, the next epoch."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next epoch."""
        number = whole("epoch", epoch, 0, "an epoch's order is derived from its number")
        self.epochs.choose(number)

    def _begin_epoch(self) -> int:
        """Begin the next epoch, and return its number."""
        self.epochs.begin(self.epochs.upcoming)
        return self.epochs.current


class KeyedSampler(CountingSampler[T]):
    """A sampler whose epochs each follow from a key.

    The key is made of ``seed`` and the epoch. Without ``seed``, a pass draws one number from ``generator``, or from
    torch's global generator, as torch's ``RandomSampler`` does. A subclass implements ``_order`` and ``__len__``.

    Attributes:
        seed: The seed from which every epoch's order follows; None if orders are drawn.
        generator: The generator from which a pass draws its key; None for torch's global generator.
    """

    _block = 4096  # how many items are looked up at once, at most

    def __init__(self, seed: int | None, generator: torch.Generator | None) -> None:
        super().__init__()
        if seed is not None and generator is not None:
            raise SamplerError(
                f"seed={seed!r} and generator={generator!r} were both given: an order follows from one of them. Pass "
                "one, or neither to draw from torch's global generator."
            )
        if generator is not None and not isinstance(cast(object, generator), torch.Generator):
            raise SamplerError(
                f"generator={generator!r} is not a generator (type {type(generator).__name__}). Pass a torch.Generator."
            )
        self.seed: int | None = None if seed is None else whole("seed", seed, 0, "epochs' orders are derived from it")
        self.generator = generator
        self._looked_up: tuple[int, At] | None = None  # the latest epoch

    def __len__(self) -> int:
        raise NotImplementedError

    def _order(self, key: np.random.SeedSequence) -> At:
        raise NotImplementedError

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Sequence[T]]:
        """Yield a pass in parts. Nothing is drawn before the first item is asked for, as in torch's samplers."""
        epoch = self._begin_epoch()
        if self.seed is not None:
            at = self._epoch(self.seed, epoch)
        else:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            at = self._order(shuffle_key(int(drawn), 0))
        for run in blocks(range(len(self)), self._block):
            found = at(np.arange(run.start, run.stop))
            yield found.tolist() if isinstance(found, np.ndarray) else found

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
            SamplerError: There is no ``seed``, so an epoch's order does not follow from its number.
        """
        if self.seed is None:
            raise SamplerError(
                f"{type(self).__name__}.items_at() was called without a seed: the order of epoch {epoch} then follows "
                "from what generators draw, not from its number. Pass seed=, or iterate the sampler."
            )
        return self._epoch(self.seed, epoch)(positions)

    def _epoch(self, seed: int, epoch: int) -> At:
        """Return an epoch, which is drawn once however often it is looked up."""
        if self._looked_up is None or self._looked_up[0] != epoch:
            self._looked_up = epoch, self._order(shuffle_key(seed, epoch))
        return self._looked_up[1]


_ROUNDS = 8
# Up to this n, a table has the permutation, because a Feistel network of so few bits does not look random.
_TABLE = 2**16
# How many positions are computed at once: more positions do not fit in the processor's caches.
_CHUNK = 2**16
# The multipliers of the round function, splitmix64's finaliser.
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Permutation:
    """Permute ``range(n)`` pseudo-randomly, and compute only the positions that are asked for.

    Args:
        n: How many numbers are permuted, from 0 to 2**63 - 1.
        key: Chooses the permutation; the same key chooses the same permutation.

    Examples:
        >>> shuffled = Permutation(10**12, np.random.SeedSequence(7))
        >>> shuffled(np.array([999_999_999_999])).item() < 10**12
        True
        >>> small = Permutation(5, np.random.SeedSequence(7))
        >>> sorted(small(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]

    Source:
        A Feistel network over the smallest power of two of at least n, applied until the result is below n (cycle
        walking): Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. Feistel networks shuffle
        well: Mitchell, Stokes, Frank and Holmes, "Bandwidth-Optimal Random Shuffling for GPUs", 2021. The round
        function is splitmix64's finaliser: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
        OOPSLA 2014.
    """

    def __init__(self, n: int, key: np.random.SeedSequence) -> None:
        self.n = n
        self._table: npt.NDArray[np.int64] | None = None
        if n <= _TABLE:
            self._table = np.random.Generator(np.random.PCG64(key)).permutation(n)
        else:
            bits = (n - 1).bit_length()
            self._low, self._high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
            self._keys = key.generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the numbers at these positions.

        Args:
            positions: Integers in ``range(n)``, in any order and number.

        Returns:
            Integers in ``range(n)``, in the shape ``(positions,)``.
        """
        if self._table is not None:
            return np.take(self._table, positions)
        if len(positions) <= _CHUNK:
            return self._computed(positions)
        chunks = [positions[start : start + _CHUNK] for start in range(0, len(positions), _CHUNK)]
        return np.concatenate([self._computed(chunk) for chunk in chunks])

    def _computed(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Apply the network until every number is below n (cycle walking)."""
        found = self._feistel(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self.n)):
            found[outside] = self._feistel(found[outside])
        return found.view(np.int64)

    def _feistel(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Permute the numbers that have at most as many bits as ``n - 1``."""
        low, high = self._low, self._high
        one = np.uint64(1)
        left, right = values >> low, values & ((one << low) - one)  # numbers of `high` and of `low` bits
        for key in self._keys:
            mixed = right ^ key
            mixed *= _MULTIPLY[0]
            mixed ^= mixed >> np.uint64(27)
            mixed *= _MULTIPLY[1]
            mixed >>= np.uint64(64) - high
            mixed ^= left
            left, right = right, mixed
            low, high = high, low
        return (left << low) | right


class ScalableRandomSampler(KeyedSampler[int]):
    """Shuffle ``range(n)`` in constant memory: each item is computed when it is needed.

    Args:
        n: How many samples there are, from 0 to 2**63 - 1.
        seed: Every epoch's order follows from the seed and the epoch's number.
        generator: If there is no seed, each pass draws one number from this generator, or else from torch's global one.

    Raises:
        SamplerError: ``n`` is out of range, or ``seed`` and ``generator`` are both passed.

    Examples:
        >>> sampler = ScalableRandomSampler(10**12, seed=0)
        >>> first = next(iter(sampler))
        >>> first == sampler.items_at(np.array([0]), epoch=0).item()
        True
    """

    _block = 2**16  # the permutation makes some hundred numpy calls, even for few positions

    def __init__(self, n: int, *, seed: int | None = None, generator: torch.Generator | None = None) -> None:
        super().__init__(seed, generator)
        self.n: int = whole("n", n, 0, "it is the number of samples to shuffle", bits=63)

    def __len__(self) -> int:
        return self.n

    def _order(self, key: np.random.SeedSequence) -> At:
        return Permutation(self.n, key)


class IterationBatchSampler(CountingSampler[list[int]]):
    """Yield a fixed number of batches, from as many epochs of a batch sampler as needed.

    Before each epoch, the wrapped samplers that have a ``set_epoch`` get the epoch's number. A stopped training resumes
    at the batch that would have come next. If the wrapped batch sampler has random access, as samplers of
    ``ddp_patch.samplers`` with a seed have, the epochs before are skipped. Otherwise these epochs are drawn again, so
    their generators must be in the states in which the training began.

    One pass is one training, and its number is this sampler's epoch. No two trainings share an epoch of the wrapped
    samplers.

    In a patched loader, all ranks together get ``num_iterations`` batches. If each rank is to make N steps, pass N
    times the number of ranks.

    Args:
        batch_sampler: A batch sampler, or any iterable of batches that can be iterated again.
        num_iterations: How many iterations the training has, including the iterations before ``start_iteration``.
        start_iteration: The first iteration, from 0.

    Raises:
        SamplerError: ``start_iteration`` is past ``num_iterations``, an argument has a wrong type, or, while drawing,
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

    def __len__(self) -> int:
        return self.num_iterations - self.start_iteration

    def __iter__(self) -> Iterator[list[int]]:
        yield from islice(self._batches(self._begin_epoch(), self.start_iteration), len(self))

    def _batches(self, training: int, left_out: int) -> Iterator[list[int]]:
        """Yield a training's batches without end, without the first ``left_out`` batches."""
        sampler: Any = self.batch_sampler
        # Every epoch has at least one batch, so a training needs at most `num_iterations` epochs.
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
