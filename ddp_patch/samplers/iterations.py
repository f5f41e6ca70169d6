"""Cut the epochs of a batch sampler into a fixed number of iterations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

from ddp_patch.errors import SamplerError
from ddp_patch.loaders.samples import tell_epoch
from ddp_patch.orders.orders import is_random_access
from ddp_patch.samplers.checks import whole
from ddp_patch.samplers.keyed import CountingSampler

__all__ = ["IterationBatchSampler"]


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
