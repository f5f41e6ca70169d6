"""Wrap another sampler: repeat it, or cut it into iterations."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from ddp_patch.errors import SamplerError
from ddp_patch.loaders.samples import deep_copy, nested_samplers, tell_epoch
from ddp_patch.orders.generators import RandomGenerator
from ddp_patch.orders.orders import is_random_access
from ddp_patch.samplers.checks import whole
from ddp_patch.samplers.keyed import CountingSampler, ScalableRandomSampler, Stateful

__all__ = [
    "IterationBatchSampler",
    "copied",
    "dataset_size",
    "epoch_of",
    "fixed_indices",
    "generators_without_state",
    "indices_of",
]


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
