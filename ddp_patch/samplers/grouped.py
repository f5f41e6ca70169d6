"""Batches of samples of the same group, of similar aspect ratios, or of similar lengths."""

import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler

from ddp_patch.errors import SamplerError
from ddp_patch.loaders.nested_samplers import deep_copy, nested_samplers, tell_epoch
from ddp_patch.orders.orders import blocks, is_random_access
from ddp_patch.orders.random_states import look
from ddp_patch.samplers.classes import Classes, Labels
from ddp_patch.samplers.keyed import (
    At,
    KeyedSampler,
    Positions,
    ScalableRandomSampler,
    flag,
    generator_of,
    positive,
    smallest,
    whole,
)


@dataclass(frozen=True, slots=True)
class Batches:
    """An epoch of batches.

    Attributes:
        items: The samples of all batches.
        bounds: Where each batch begins and ends in ``items``, in the shape ``(batches, 2)``.

    Examples:
        >>> batches = Batches(np.array([7, 8, 9]), _cut(np.array([3]), 2))
        >>> batches(np.array([1, 0]))
        [[9], [7, 8]]
    """

    items: npt.NDArray[np.integer[Any]]
    bounds: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds)

    def __call__(self, positions: Positions) -> list[list[int]]:
        """Return the batches at some positions."""
        return [self.items[start:stop].tolist() for start, stop in self.bounds[positions].tolist()]


class GroupedBatchSampler(Sampler[list[int]]):
    """Make batches of a single group each, from a sampler whose order is kept.

    The samples of a group stay in the sampler's order, and the batches come in the order of their first samples. Every
    epoch of the sampler is drawn at once.

    If the sampler's epochs have different indices, as with replacement, the number of batches differs between epochs.
    ``len()`` is then the number of the running pass or, between passes, of the next pass, which a copy of the sampler
    draws. This number is right if the order follows from a seed or an epoch, in a patched loader, and if no other code
    draws from the sampler's generator in between. An unpatched ``DataLoader`` draws from it for its workers' seed.

    Args:
        sampler: A sampler of indices into ``group_ids``, or any finite iterable of them.
        group_ids: Each dataset sample's group, of any hashable type.
        batch_size: How many samples a batch has.
        drop_uneven: Whether to leave out batches with fewer samples, which the end of a group may make.

    Raises:
        SamplerError: ``group_ids`` is empty, an argument has a wrong type, or, while drawing, an index has no group.

    Examples:
        >>> list(GroupedBatchSampler(range(7), group_ids="aabbaba", batch_size=2))
        [[0, 1], [2, 3], [4, 6], [5]]
        >>> list(GroupedBatchSampler(range(7), "aabbaba", 2, drop_uneven=True))
        [[0, 1], [2, 3], [4, 6]]

    Source:
        maskrcnn-benchmark's ``GroupedBatchSampler`` has the same order of batches.
    """

    def __init__(self, sampler: Iterable[int], group_ids: Labels, batch_size: int, drop_uneven: bool = False) -> None:
        self.sampler = sampler
        self._groups = Classes.of("group_ids", group_ids)
        self.batch_size: int = whole("batch_size", batch_size, 1, "it is the number of samples in a batch")
        self.drop_uneven: bool = flag("drop_uneven", drop_uneven)
        groups = len(self._groups.codes)
        if isinstance(sampler, RandomSampler | SequentialSampler) and len(sampler.data_source) != groups:
            raise SamplerError(
                f"group_ids has {groups} entries, and the {type(sampler).__name__} is of a dataset with "
                f"{len(sampler.data_source)} samples: each is in one group. Pass one group for each sample of the "
                "dataset."
            )
        self._running: Batches | None = None  # the latest pass, unless it has ended
        self._looked_up: tuple[int, Batches] | None = None  # the latest epoch

    @property
    def drop_last(self) -> bool:
        """``drop_uneven``, by torch's name."""
        return self.drop_uneven

    @property
    def epoch(self) -> int:
        """The wrapped sampler's epoch, or 0 if it has none."""
        epoch = getattr(self.sampler, "epoch", 0)
        return epoch if isinstance(epoch, int) else 0

    @property
    def has_random_access(self) -> bool:
        """Whether any part of any epoch can be looked up: the wrapped sampler is one of this package's, with a seed."""
        return self._keyed is not None

    @property
    def _keyed(self) -> KeyedSampler[int] | None:
        """The wrapped sampler, if its epochs can be looked up."""
        return self.sampler if is_random_access(self.sampler) and isinstance(self.sampler, KeyedSampler) else None

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the wrapped sampler's next epoch."""
        self._running = None
        tell_epoch(self.sampler, epoch)

    def __len__(self) -> int:
        if self._running is not None:
            return len(self._running)
        if self._keyed is not None:
            return len(self._epoch(self._keyed, self._keyed.epochs.upcoming))
        if (indices := _fixed_indices(self.sampler)) is None:
            nested = (getattr(sampler, "__dict__", {}).values() for sampler in nested_samplers(self.sampler))
            datasets = [value for value in chain.from_iterable(nested) if isinstance(value, Dataset)]
            with look():
                indices = list(deep_copy(self.sampler, sharing=datasets))
        return len(self._bounds(self._group_of(_as_indices(indices, type(self.sampler).__name__))))

    def __iter__(self) -> Iterator[list[int]]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[list[list[int]]]:
        batches = self._running = self._batches(self.sampler)
        for run in blocks(range(len(batches))):
            yield batches(np.arange(run.start, run.stop))
        self._running = None

    def items_at(self, positions: Positions, epoch: int) -> list[list[int]]:
        """Return the batches at some positions of an epoch.

        Args:
            positions: Positions of batches, in any order and number.
            epoch: From 0.

        Returns:
            The indices of each batch, in the order of the positions.

        Raises:
            SamplerError: The wrapped sampler has no random access.
        """
        if self._keyed is None:
            raise SamplerError(
                f"GroupedBatchSampler.items_at() was called over a {type(self.sampler).__name__}, which can only be "
                "iterated. Give it a sampler of ddp_patch.samplers with seed=, or iterate it."
            )
        return self._epoch(self._keyed, epoch)(positions)

    def _epoch(self, sampler: KeyedSampler[int], epoch: int) -> Batches:
        """Return an epoch, which is drawn only once, even if it is looked up often."""
        if self._looked_up is None or self._looked_up[0] != epoch:
            self._looked_up = epoch, self._batches(sampler.items_at(np.arange(len(sampler)), epoch))
        return self._looked_up[1]

    def _batches(self, drawn: Iterable[int]) -> Batches:
        """Group the indices of an epoch into batches."""
        indices = _as_indices(drawn, type(self.sampler).__name__)
        group_of = self._group_of(indices)
        places = np.argsort(group_of, kind="stable")  # group by group, in the sampler's order
        bounds = self._bounds(group_of)
        return Batches(indices[places], bounds[np.argsort(places[bounds[:, 0]])])

    def _group_of(self, indices: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
        groups = self._groups.codes
        if len(odd := np.flatnonzero((indices < 0) | (indices >= len(groups)))):
            raise SamplerError(
                f"{type(self.sampler).__name__} gave the index {indices[odd[0]]}, and group_ids has {len(groups)} "
                "entries: that sample is in no group. Pass one group for each sample of the dataset."
            )
        return np.take(groups, indices)

    def _bounds(self, group_of: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return where the batches begin and end among the grouped samples."""
        bounds = _cut(np.bincount(group_of, minlength=len(self._groups.labels)), self.batch_size)
        return bounds[bounds[:, 1] - bounds[:, 0] == self.batch_size] if self.drop_uneven else bounds


def _fixed_indices(sampler: Iterable[int]) -> Iterable[int] | None:
    """Return the indices that every epoch has, in any order, or None if epochs may differ.

    Examples:
        >>> _fixed_indices(RandomSampler(range(3))), _fixed_indices(RandomSampler(range(3), replacement=True))
        (array([0, 1, 2]), None)
    """
    # Exact types, because a subclass may yield other indices.
    if type(sampler) is RandomSampler:
        takes_all = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return np.arange(len(sampler.data_source)) if takes_all else None
    if type(sampler) is SequentialSampler or type(sampler) is ScalableRandomSampler:
        return np.arange(len(sampler))
    if type(sampler) is SubsetRandomSampler:
        return sampler.indices
    return sampler if type(sampler) in (list, tuple, range, np.ndarray, torch.Tensor) else None


def _as_indices(drawn: Iterable[Any], name: str) -> npt.NDArray[np.integer[Any]]:
    """Return the indices of a sampler of this name as an array of integers, or raise SamplerError."""
    if isinstance(drawn, np.ndarray) and drawn.ndim == 1 and drawn.dtype.kind in "iu":
        return drawn
    found = drawn.tolist() if isinstance(drawn, np.ndarray) else list(drawn)
    try:
        return np.fromiter(map(operator.index, found), np.int64, len(found))
    except (TypeError, OverflowError) as error:
        raise SamplerError(
            f"{name} gave something other than a whole number ({error}): group_ids is looked up by index. Give "
            "GroupedBatchSampler a sampler of indices."
        ) from error


def _cut(sizes: npt.NDArray[np.int64], batch_sizes: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
    """Cut consecutive groups into batches; a group's last batch has the rest.

    Args:
        sizes: How many samples each group has.
        batch_sizes: How many samples make a batch: a number for each group, or one number for all groups.

    Returns:
        Each batch's first position, and the position after its last, in the shape ``(batches, 2)``.

    Examples:
        >>> _cut(np.array([5, 2]), np.array([2, 2])).tolist()
        [[0, 2], [2, 4], [4, 5], [5, 7]]
    """
    if isinstance(batch_sizes, int):
        batch_sizes = np.full(len(sizes), min(batch_sizes, sizes.max(initial=1)))
    batch_sizes = np.clip(batch_sizes, 1, np.maximum(sizes, 1))  # so that no sum below overflows
    counts = -(-sizes // batch_sizes)
    group = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a batch in its group
    ends = np.cumsum(sizes)
    starts = (ends - sizes)[group] + number * batch_sizes[group]
    return np.stack([starts, np.minimum(starts + batch_sizes[group], ends[group])], axis=1)


class LengthBucketBatchSampler(KeyedSampler[list[int]]):
    """Make shuffled batches of samples of similar length, by a token budget or a fixed batch size.

    Samples are sorted into buckets by length. In a bucket, no sample is shorter than the longest by more than the part
    ``max_padding``, so at most this part of a batch is padding. Each batch comes from one bucket, and its padded tokens
    (samples times the longest length) are at most ``max_tokens``. A bucket's last batch has the rest. Every epoch
    shuffles the samples of each bucket, and the batches; the number of batches stays the same.

    Args:
        lengths: Each sample's length, in tokens: a list, array or tensor.
        max_tokens: How many tokens a padded batch has at most.
        batch_size: How many samples a batch has, instead of ``max_tokens``.
        max_padding: How large a part of a batch may be padding, from 0 to less than 1. Less padding makes more batches.
        seed: Every epoch's batches follow from the seed and the epoch's number.
        generator: If there is no seed, each pass draws one number from this generator, or else from torch's global one.

    Raises:
        SamplerError: A sample is longer than ``max_tokens``, both or neither of ``max_tokens`` and ``batch_size`` are
            passed, or an argument has a wrong type.

    Examples:
        >>> lengths = [10, 3, 10, 10, 3, 3]
        >>> batches = LengthBucketBatchSampler(lengths, max_tokens=20, seed=0)
        >>> sorted(sorted(lengths[index] for index in batch) for batch in batches)
        [[3, 3, 3], [10], [10, 10]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[np.integer] | torch.Tensor,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        max_padding: float = 0.1,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(seed, generator)
        found = positive("lengths", lengths, "iu", "a whole number of tokens, at least 1").astype(np.int64)
        name, given = ("batch_size", batch_size) if max_tokens is None else ("max_tokens", max_tokens)
        if (max_tokens is None) == (batch_size is None):
            raise SamplerError(
                f"max_tokens={max_tokens!r} and batch_size={batch_size!r}: each says how large a batch is. Pass one "
                "of them."
            )
        size = whole(name, given, 1, "it says how large a batch is")
        self.max_tokens: int | None = size if batch_size is None else None
        self.batch_size: int | None = size if max_tokens is None else None
        if self.max_tokens is not None and (longest := int(found.max())) > self.max_tokens:
            raise SamplerError(
                f"lengths[{found.argmax()}]={longest} is longer than max_tokens={self.max_tokens}, so no batch can "
                "hold that sample. Pass a larger max_tokens, or shorten it or leave it out."
            )
        self.max_padding: float = _part(max_padding)
        items, self._sizes, longest_of = _buckets(found, self.max_padding)
        batch_sizes = self.batch_size or min(self.max_tokens or 0, sys.maxsize) // longest_of
        self._items, self._bounds = items, _cut(self._sizes, batch_sizes)

    def __len__(self) -> int:
        return len(self._bounds)

    def _order(self, key: np.random.SeedSequence) -> At:
        rng = generator_of(key)
        items = self._items.copy()
        for bucket in np.split(items, np.cumsum(self._sizes)[:-1]):  # views, so this shuffles `items`
            rng.shuffle(bucket)
        return Batches(items, self._bounds[rng.permutation(len(self))])


def _part(value: Any) -> float:
    """Return a number from 0 to less than 1 as a float, or raise SamplerError."""
    part = -1.0 if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not 0 <= part < 1:
        raise SamplerError(
            f"max_padding={value!r} is not a number from 0 to less than 1: it is the part of a batch that may be "
            "padding. Pass one, say 0.1."
        )
    return part


def _buckets(
    lengths: npt.NDArray[np.int64], max_padding: float
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sort samples into buckets, from the longest on.

    Returns:
        The samples bucket by bucket, each bucket's size, and each bucket's longest sample.
    """
    longest_first = np.argsort(-lengths, kind="stable").astype(smallest(len(lengths)))
    values, counts = np.unique(-lengths, return_counts=True)
    firsts = [0]  # the first value of each bucket
    while True:
        least = int(-values[firsts[-1]]) * (1 - max_padding)
        end = int(np.searchsorted(values, -least, side="right"))
        if end == len(values):
            return longest_first, np.add.reduceat(counts, firsts), -values[firsts]
        firsts.append(end)


def aspect_ratio_groups(
    widths: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
    heights: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
    edges: Sequence[float] = (1.0,),
) -> npt.NDArray[np.int64]:
    """Group pictures by the interval of their aspect ratio, width / height.

    Args:
        widths: Each picture's width, in any unit, above 0.
        heights: Each picture's height, in the same unit, above 0.
        edges: The ratios that bound the intervals, in increasing order. An edge belongs to the upper interval. With the
            default, upright pictures are in group 0, square and wide ones in group 1.

    Returns:
        Each picture's group, from 0 to ``len(edges)``, in the shape ``(pictures,)``.

    Raises:
        SamplerError: A size is not above 0, the edges do not increase, or widths and heights differ in number.

    Examples:
        >>> aspect_ratio_groups([640, 480, 500], [480, 640, 500]).tolist()
        [1, 0, 1]
        >>> aspect_ratio_groups([640, 480, 500], [480, 640, 500], edges=[0.8, 1.25]).tolist()
        [2, 0, 1]

    Source:
        torchvision's detection references, ``group_by_aspect_ratio.py``.
    """
    given = {"widths": widths, "heights": heights, "edges": edges}
    wide, high, bounds = (positive(name, values, "iuf", "a finite number above 0") for name, values in given.items())
    if len(wide) != len(high):
        raise SamplerError(
            f"widths has {len(wide)} entries and heights {len(high)}: a picture has one of each. Pass sequences of one "
            "length."
        )
    if (np.diff(bounds) <= 0).any():
        raise SamplerError(
            f"edges={bounds.tolist()} do not increase, so they bound no intervals. Pass aspect ratios in increasing "
            "order."
        )
    groups: npt.NDArray[np.int64] = np.searchsorted(bounds, wide / high, side="right")
    return groups
