"""Batches of samples of one group, or of alike aspect ratios."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from ddp_patch.errors import SamplerError
from ddp_patch.loaders.samples import deep_copy, nested_samplers, tell_epoch
from ddp_patch.orders.generators import RandomGenerator, generator_state, is_stateful, set_generator_state
from ddp_patch.orders.orders import is_random_access
from ddp_patch.orders.random_states import GlobalState, look
from ddp_patch.samplers.checks import flag, sequence, whole
from ddp_patch.samplers.classes import Classes, Labels
from ddp_patch.samplers.keyed import (
    KeyedSampler,
    LatestEpoch,
    Positions,
    ResumableSampler,
    ScalableRandomSampler,
    check_number,
)
from ddp_patch.samplers.lengths import LengthBatches, cut

__all__ = ["GroupedBatchSampler", "aspect_ratio_groups"]


class GroupedBatchSampler(ResumableSampler[list[int]]):
    """Make batches of one group each, from a sampler whose order is kept.

    The samples of a group stay in the sampler's order, and the batches come in the order of their first samples. Every
    epoch of the sampler is drawn at once.

    If the sampler's epochs have different indices, as with replacement, the number of batches differs between epochs.
    ``len()`` is then that of the running pass or, between passes, of the next one, which a copy of the sampler draws.
    This is right if the order follows from a seed or an epoch, in a patched loader, and if nobody else draws from the
    sampler's generator in between. An unpatched ``DataLoader`` does draw from it, for its workers' seed.

    ``state_dict()`` works in the middle of a pass unless the wrapped sampler drew that pass from the global generators.
    It always works with a sampler of ``ddp_patch.samplers``.

    Args:
        sampler: Gives indices into ``group_ids``: a sampler, or any iterable that ends.
        group_ids: Each dataset sample's group, of any hashable type.
        batch_size: How many samples a batch has.
        drop_uneven: Whether to leave out batches with fewer samples, which the end of a group may make.

    Raises:
        SamplerError: ``group_ids`` is empty, an argument is of another kind, or, while drawing, an index has no group.

    Examples:
        >>> list(GroupedBatchSampler(range(7), group_ids="aabbaba", batch_size=2))
        [[0, 1], [2, 3], [4, 6], [5]]
        >>> list(GroupedBatchSampler(range(7), "aabbaba", 2, drop_uneven=True))
        [[0, 1], [2, 3], [4, 6]]

    Source:
        The order of the batches is that of maskrcnn-benchmark's ``GroupedBatchSampler``.
    """

    def __init__(self, sampler: Iterable[int], group_ids: Labels, batch_size: int, drop_uneven: bool = False) -> None:
        self.sampler = sampler
        self._groups = Classes.of("group_ids", group_ids)
        self.batch_size: int = whole("batch_size", batch_size, 1, "it is the number of samples in a batch")
        self.drop_uneven: bool = flag("drop_uneven", drop_uneven, "batches with fewer samples are left out or come")
        groups = len(self._groups.codes)
        if isinstance(sampler, RandomSampler | SequentialSampler) and len(sampler.data_source) != groups:
            raise SamplerError(
                f"group_ids has {groups} entries, and the {type(sampler).__name__} is of a dataset with "
                f"{len(sampler.data_source)} samples: each is in one group. Pass one group for each sample of the "
                "dataset."
            )
        self._length = 0  # of the latest pass
        self._begun: dict[str, Any] | None = None  # what the latest pass follows from, if a state can hold that
        self._latest = LatestEpoch[LengthBatches]()

    @property
    def drop_last(self) -> bool:
        """``drop_uneven``, by torch's name for it."""
        return self.drop_uneven

    @property
    def epoch(self) -> int:
        """The wrapped sampler's epoch, or 0 if it has none."""
        return _epoch_of(self.sampler) or 0

    @property
    def has_random_access(self) -> bool:
        """Whether any part of any epoch can be looked up, which needs one of these samplers with a seed inside."""
        return self._keyed is not None

    @property
    def _keyed(self) -> KeyedSampler[int] | None:
        """The wrapped sampler, if epochs can be looked up in it."""
        return self.sampler if is_random_access(self.sampler) and isinstance(self.sampler, KeyedSampler) else None

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the wrapped sampler's next one."""
        # Keep a pass that was loaded if it is of this epoch, which only the wrapped sampler knows.
        is_to_come = not self._is_running and getattr(self.sampler, "epoch", epoch) == epoch
        tell_epoch(self.sampler, epoch)
        if not is_to_come:
            self._leave()

    def __len__(self) -> int:
        if self._is_running:
            return self._length
        if (fixed := _fixed_indices(self.sampler)) is not None:
            return self._number(fixed)
        if self._keyed is not None:
            return len(self._epoch(self._keyed, self._keyed.epochs.upcoming))
        held = _attributes(nested_samplers(self.sampler))
        datasets = [value for value in held if isinstance(value, Dataset)]  # which the copy shares
        with look():
            return self._number(deep_copy(self.sampler, sharing=datasets))

    def _number(self, drawn: Iterable[int]) -> int:
        """Return how many batches these indices make."""
        return len(self._cut(self._group_of(_indices_of(self.sampler, drawn))))

    def items_at(self, positions: Positions, epoch: int) -> list[list[int]]:
        """Return the batches at some positions of an epoch.

        Args:
            positions: Positions of batches, in any order and number.
            epoch: From 0.

        Returns:
            The indices of each batch, in the order of the positions.

        Raises:
            SamplerError: The wrapped sampler cannot be looked up.
        """
        if self._keyed is None:
            raise SamplerError(
                f"GroupedBatchSampler.items_at() was called over a {type(self.sampler).__name__}, which can only be "
                "iterated. Give it a sampler of ddp_patch.samplers with seed=, or iterate it."
            )
        return self._epoch(self._keyed, epoch)(positions)

    def _epoch(self, sampler: KeyedSampler[int], epoch: int) -> LengthBatches:
        return self._latest.of(epoch, lambda: self._batches(sampler.items_at(np.arange(len(sampler)), epoch)))

    def _begin(self, skip: int) -> Iterator[Sequence[list[int]]]:
        before, ambient = self._state(in_pass=False), GlobalState.capture().values()
        batches = self._batches(self.sampler)
        if isinstance(self.sampler, KeyedSampler):
            self._begun = before | {"sampler": self.sampler.state_of_latest_pass()}
        else:  # no state holds the global generators, so it must not have drawn from them
            self._begun = before if GlobalState.capture().values() == ambient else None
        self._length = len(batches)
        return self._looked_up(batches, skip, self._length)

    def _batches(self, drawn: Iterable[int]) -> LengthBatches:
        """Group the indices of an epoch into batches."""
        indices = _indices_of(self.sampler, drawn)
        group_of = self._group_of(indices)
        places = np.argsort(group_of, kind="stable")  # group by group, in the sampler's order
        bounds = self._cut(group_of)
        return LengthBatches(indices[places], bounds[np.argsort(places[bounds[:, 0]])])

    def _group_of(self, indices: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
        groups = self._groups.codes
        if len(odd := np.flatnonzero((indices < 0) | (indices >= len(groups)))):
            raise SamplerError(
                f"{type(self.sampler).__name__} gave the index {indices[odd[0]]}, and group_ids has {len(groups)} "
                "entries: that sample is in no group. Pass one group for each sample of the dataset."
            )
        return np.take(groups, indices)

    def _cut(self, group_of: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return where the batches begin and end once the samples are grouped."""
        bounds = cut(np.bincount(group_of, minlength=len(self._groups.labels)), self.batch_size)
        return bounds[bounds[:, 1] - bounds[:, 0] == self.batch_size] if self.drop_uneven else bounds

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        if in_pass and self._begun is None:
            raise SamplerError(
                f"GroupedBatchSampler.state_dict() was called in the middle of a pass that its "
                f"{type(self.sampler).__name__} drew from the global generators, which no state can restore. Give that "
                "sampler generator=, wrap one of ddp_patch.samplers, or ask between two passes."
            )
        if in_pass and self._begun is not None:
            return self._begun
        sampler: Any = self.sampler
        has_state = is_stateful(sampler)
        return {
            "epoch": None if has_state else _epoch_of(sampler),
            "sampler": getattr(sampler, "state_between_passes", sampler.state_dict)() if has_state else None,
            "generators": [generator_state(generator) for generator in _generators_without_state(sampler)],
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state["epoch"] is not None:
            check_number(self, "epoch", state["epoch"], 0)
        here = self._state(in_pass=False)
        is_alike = (state["sampler"] is None) == (here["sampler"] is None)
        if not is_alike or len(state["generators"]) != len(here["generators"]):
            raise SamplerError(
                "GroupedBatchSampler.load_state_dict() was given the state of another kind of sampler than its "
                f"{type(self.sampler).__name__}: one has a state_dict(), or a generator, and the other does not. Wrap "
                "a sampler of the kind that was saved."
            )

    def _load_state(self, state: Mapping[str, Any]) -> None:
        if state["epoch"] is not None:
            tell_epoch(self.sampler, state["epoch"])
        for generator, saved in zip(_generators_without_state(self.sampler), state["generators"], strict=True):
            set_generator_state(generator, saved)
        sampler: Any = self.sampler
        if is_stateful(sampler):
            sampler.load_state_dict(state["sampler"])


def _epoch_of(sampler: object) -> int | None:
    """Return the epoch that a sampler says it is in, or None if it says none.

    Examples:
        >>> _epoch_of(ScalableRandomSampler(3)), _epoch_of([0, 1, 2])
        (0, None)
    """
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) and epoch >= 0 else None


def _fixed_indices(sampler: Iterable[int]) -> Iterable[int] | None:
    """Return the indices that every epoch has, in any order, or None if epochs may differ.

    Examples:
        >>> _fixed_indices(RandomSampler(range(3))), _fixed_indices(RandomSampler(range(3), replacement=True))
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


def _indices_of(sampler: object, drawn: Iterable[Any]) -> npt.NDArray[np.integer[Any]]:
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


def _generators_without_state(sampler: object) -> list[RandomGenerator]:
    """Return the generators of the nested samplers that have no ``state_dict`` to save them in."""
    stateless = (nested for nested in nested_samplers(sampler) if not is_stateful(nested))
    return [value for value in _attributes(stateless) if isinstance(value, RandomGenerator)]


def _attributes(samplers: Iterable[object]) -> Iterator[object]:
    """Yield the values of samplers' attributes."""
    return (value for sampler in samplers for value in getattr(sampler, "__dict__", {}).values())


def aspect_ratio_groups(
    widths: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
    heights: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
    edges: Sequence[float] = (1.0,),
) -> npt.NDArray[np.int64]:
    """Group pictures by the interval that their aspect ratio, width / height, lies in.

    Args:
        widths: Each picture's width, in any unit, above 0.
        heights: Each picture's height, in the same unit, above 0.
        edges: The ratios between one interval and the next, in increasing order. An edge belongs to the upper interval.
            With the default, upright pictures are in group 0, square and wide ones in group 1.

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
    wide, high, bounds = (_numbers(*pair) for pair in (("widths", widths), ("heights", heights), ("edges", edges)))
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
    return np.searchsorted(bounds, wide / high, side="right")


def _numbers(name: str, values: Any) -> npt.NDArray[np.float64]:
    """Return finite numbers above 0 as one array, or raise SamplerError."""
    found = np.asarray(sequence(name, values, "aspect ratios are made of numbers"))
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        raise SamplerError(
            f"{name} has the shape {found.shape} and the type {found.dtype}: aspect ratios are made of numbers. Pass a "
            "flat list, array or tensor of them."
        )
    if len(odd := np.flatnonzero(~((found > 0) & np.isfinite(found)))):
        raise SamplerError(
            f"{name}[{odd[0]}]={found[odd[0]]} is not a finite number above 0, and an aspect ratio is width / height. "
            "Correct it or leave it out."
        )
    return found.astype(np.float64)
