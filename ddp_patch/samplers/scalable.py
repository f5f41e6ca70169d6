"""A shuffle in constant memory."""

import numpy as np
import torch

from ddp_patch.samplers.checks import whole
from ddp_patch.samplers.keyed import KeyedSampler
from ddp_patch.samplers.passes import At
from ddp_patch.streams.permutation import Permutation

__all__ = ["ScalableRandomSampler"]


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
