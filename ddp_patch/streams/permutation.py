"""A keyed bijection of ``range(n)`` with random access: a shuffle of which any part costs only itself."""

import numpy as np
import numpy.typing as npt

from ddp_patch.errors import InvalidOptionError

__all__ = ["Permutation"]

_ROUNDS = 8
# So small a range is shuffled in a table: a Feistel network has too few halves there to look random.
_TABLE = 2**16
# So many positions are computed together: more do not stay in the processor's caches.
_CHUNK = 2**16
# Multipliers of splitmix64 (its finaliser mixes the round function's bits).
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Permutation:
    """A pseudo-random permutation of ``range(n)`` that is computed at the positions asked for.

    Args:
        n: How many, from 0 to 2**63 - 1.
        key: What it follows from: each key has a permutation of its own.

    Raises:
        InvalidOptionError: ``n`` is out of range.

    Examples:
        >>> shuffled = Permutation(10**12, np.random.SeedSequence(7))
        >>> shuffled(np.array([999_999_999_999])).item() < 10**12
        True
        >>> small = Permutation(5, np.random.SeedSequence(7))
        >>> sorted(small(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]

    Source:
        A Feistel network over the smallest power of two that holds n, applied again until it falls below n (cycle
        walking): Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. That such networks shuffle
        well is shown by Mitchell, Stokes, Frank and Holmes, "Bandwidth-Optimal Random Shuffling for GPUs", 2021. The
        round function is splitmix64's finaliser: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
        Generators", OOPSLA 2014.
    """

    def __init__(self, n: int, key: np.random.SeedSequence) -> None:
        if not 0 <= n < 2**63:
            raise InvalidOptionError(
                f"A permutation of range({n}) was asked for: positions are 64-bit integers. Pass n from 0 to 2**63 - 1."
            )
        self.n = n
        self._table: npt.NDArray[np.int64] | None = None
        if n <= _TABLE:
            self._table = np.random.Generator(np.random.PCG64(key)).permutation(n)
        else:
            bits = (n - 1).bit_length()
            self._low, self._high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
            self._keys = key.generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return what stands at these positions.

        Args:
            positions: Integers in ``range(n)``, in any order and number.
        """
        if self._table is not None:
            return np.take(self._table, positions)
        if len(positions) <= _CHUNK:
            return self._computed(positions)
        chunks = [positions[start : start + _CHUNK] for start in range(0, len(positions), _CHUNK)]
        return np.concatenate([self._computed(chunk) for chunk in chunks])

    def _computed(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        found = self._feistel(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self.n)):
            found[outside] = self._feistel(found[outside])
        return found.view(np.int64)

    def _feistel(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Permute the numbers of as many bits as ``n - 1`` has."""
        low, high = self._low, self._high
        one = np.uint64(1)
        left, right = values >> low, values & ((one << low) - one)  # of `high` and `low` bits
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
