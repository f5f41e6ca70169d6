"""A shuffle of ``range(n)`` that computes any of its positions alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddp_patch.errors import InvalidOptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

__all__ = ["Permutation"]

_ROUNDS = 8
# Up to this n a table holds the permutation, because a Feistel network of so few bits does not look random.
_TABLE = 2**16
# How many positions are computed at once: more do not fit in the processor's caches.
_CHUNK = 2**16
# The multipliers of splitmix64's finaliser, which is the round function.
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Permutation:
    """Permute ``range(n)`` pseudo-randomly, and compute only the positions that are asked for.

    Args:
        n: How many numbers are permuted, from 0 to 2**63 - 1.
        key: Chooses the permutation; the same key gives the same one.

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
                f"range({n}) cannot be permuted: positions are 64-bit integers. Pass n from 0 to 2**63 - 1."
            )
        self.n = n
        self._table: NDArray[np.int64] | None = None
        if n <= _TABLE:
            self._table = np.random.Generator(np.random.PCG64(key)).permutation(n)
        else:
            bits = (n - 1).bit_length()
            self._low, self._high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
            self._keys = key.generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
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

    def _computed(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Apply the network until every number is below n (cycle walking)."""
        found = self._feistel(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self.n)):
            found[outside] = self._feistel(found[outside])
        return found.view(np.int64)

    def _feistel(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute the numbers that have at most as many bits as ``n - 1``."""
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
