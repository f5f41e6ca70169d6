"""As many batches as a training has iterations."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

from torch.utils.data import Sampler

from ddp_patch.errors import SamplerError
from ddp_patch.nesting import tell_epoch
from ddp_patch.samplers.checks import whole
from ddp_patch.samplers.passes import check_state, named_state
from ddp_patch.seeding import EpochCounter

__all__ = ["IterationBatchSampler"]


class IterationBatchSampler(Sampler[list[int]]):
    """As many batches as a training has iterations, going on from epoch to epoch of a batch sampler.

    Before each epoch the wrapped samplers are told its number by ``set_epoch``, where they have one. A training that
    stopped goes on at the batch that it would have had next: what comes before is looked up where the wrapped samplers
    follow from a seed, and else drawn and dropped.

    A pass is one training. Patched, all ranks together make ``num_iterations`` batches: to make as many steps on each,
    multiply by the number of ranks.

    Args:
        batch_sampler: A batch sampler, or any iterable of batches that can be iterated again.
        num_iterations: The training's last iteration is the one before it.
        start_iteration: The first one.

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

    # The epochs of the wrapped samplers are this sampler's to tell.
    sets_nested_epochs = True

    def __init__(self, batch_sampler: Iterable[list[int]], num_iterations: int, start_iteration: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.num_iterations = whole("num_iterations", num_iterations, 1, "a training has so many")
        self.start_iteration = whole("start_iteration", start_iteration, 0, "the training begins there")
        if self.start_iteration > self.num_iterations:
            raise SamplerError(
                f"start_iteration={start_iteration} is past num_iterations={num_iterations}: nothing would be left. "
                "Pass a later end, or an earlier start."
            )
        self.epochs = EpochCounter()
        self._next: int | None = None  # of the pass that is running
        self._loaded: int | None = None  # where the next pass begins

    def __len__(self) -> int:
        return self.num_iterations - self.start_iteration

    @property
    def epoch(self) -> int:
        """Which training is being drawn, or before the first the one that will be."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the number of the next training, in which no epoch of another training comes again."""
        before = self.epochs.upcoming if self._next is None else None
        self.epochs.set(whole("epoch", epoch, 0, "an epoch's order is derived from its number"))
        self._next = None
        if self.epochs.upcoming != before:
            self._loaded = None

    def __iter__(self) -> Iterator[list[int]]:
        loaded, self._loaded = self._loaded, None
        first = self.start_iteration if loaded is None else loaded
        self.epochs.begin(self.epochs.upcoming)
        self._next = first
        for batch in islice(self._batches(self.epochs.current, first), self.num_iterations - first):
            self._next += 1
            yield batch
        self._next = None

    def _batches(self, training: int, left_out: int) -> Iterator[list[int]]:
        """Yield the training's batches without end, but for so many at its beginning."""
        sampler: Any = self.batch_sampler
        # A training has at least a batch of each of its epochs, so no other training has these.
        for epoch in count(training * self.num_iterations):
            tell_epoch(sampler, epoch)
            if getattr(sampler, "has_random_access", False) is True and 0 < len(sampler) <= left_out:
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

    def state_dict(self) -> dict[str, Any]:
        """Return which iteration comes next, as plain values: the training's number, and the iteration in it."""
        here = self._next if self._next is not None else self._loaded
        epoch = self.epochs.upcoming if self._next is None else self.epochs.current
        return named_state(self, {"epoch": epoch, "iteration": self.start_iteration if here is None else here})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next pass go on at the iteration where a state was taken, of a sampler with the same arguments.

        Raises:
            SamplerError: It is the state of something else.
        """
        check_state(self, state_dict, {"epoch", "iteration"})
        self.epochs.set(state_dict["epoch"])
        self._next, self._loaded = None, state_dict["iteration"]
