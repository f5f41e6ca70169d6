"""The sampler that another one wraps: which indices it gives, and what it draws them from."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from ddp_patch.errors import SamplerError
from ddp_patch.loaders.nesting import deep_copy, nested_samplers
from ddp_patch.samplers.scalable import ScalableRandomSampler
from ddp_patch.samplers.states import Stateful
from ddp_patch.streams.generators import RandomGenerator

__all__ = ["copied", "dataset_size", "epoch_of", "fixed_indices", "generators_without_state", "indices_of"]


def epoch_of(sampler: object) -> int | None:
    """Return the epoch that a sampler says it is in, or None if it says none.

    Examples:
        >>> epoch_of(ScalableRandomSampler(3)), epoch_of([0, 1, 2])
        (0, None)
    """
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) and epoch >= 0 else None


def dataset_size(sampler: object) -> int | None:
    """Return how many samples a sampler's dataset has, or None if the sampler does not know it."""
    return len(sampler.data_source) if isinstance(sampler, RandomSampler | SequentialSampler) else None


def fixed_indices(sampler: Iterable[int]) -> Iterable[int] | None:
    """Return the indices that every epoch has, in any order, or None if epochs may differ.

    Examples:
        >>> fixed_indices(RandomSampler(range(3))), fixed_indices(RandomSampler(range(3), replacement=True))
        (array([0, 1, 2]), None)
    """
    # Exact types, because a subclass may give other indices.
    if type(sampler) is RandomSampler:
        takes_all = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return np.arange(len(sampler.data_source)) if takes_all else None
    if type(sampler) is SequentialSampler or type(sampler) is ScalableRandomSampler:
        return np.arange(len(sampler))
    if type(sampler) is SubsetRandomSampler:
        return sampler.indices
    return sampler if type(sampler) in (list, tuple, range, np.ndarray, torch.Tensor) else None


def indices_of(sampler: object, drawn: Iterable[Any]) -> npt.NDArray[np.integer[Any]]:
    """Return what a sampler gave as one array of integers.

    Raises:
        SamplerError: Something in it is no integer of 64 bits.
    """
    if isinstance(drawn, np.ndarray) and drawn.ndim == 1 and drawn.dtype.kind in "iu":
        return drawn
    found = drawn.tolist() if isinstance(drawn, np.ndarray) else list(drawn)
    try:
        return np.fromiter(map(operator.index, found), np.int64, len(found))
    except (TypeError, OverflowError) as error:
        raise SamplerError(
            f"{type(sampler).__name__} gave something other than a whole number ({error}): group_ids is looked "
            "up by index. Give GroupedBatchSampler a sampler of indices."
        ) from error


def copied(sampler: Iterable[int]) -> Iterable[int]:
    """Copy a sampler to draw from the copy; datasets are shared and not copied."""
    datasets = [value for nested in nested_samplers(sampler) for value in _values(nested) if isinstance(value, Dataset)]
    return deep_copy(sampler, sharing=datasets)


def generators_without_state(sampler: object) -> list[RandomGenerator]:
    """Return the generators of the nested samplers that have no ``state_dict`` to save them in."""
    stateless = (nested for nested in nested_samplers(sampler) if not isinstance(nested, Stateful))
    return [value for nested in stateless for value in _values(nested) if isinstance(value, RandomGenerator)]


def _values(sampler: object) -> Iterator[object]:
    """Yield the values of an object's attributes."""
    yield from getattr(sampler, "__dict__", {}).values()
