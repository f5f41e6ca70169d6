"""Batches of one group each."""

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler

from ddp_patch.errors import SamplerError
from ddp_patch.loaders.nesting import nested_samplers, tell_epoch
from ddp_patch.samplers.batches import Batches, cut
from ddp_patch.samplers.checks import flag, sequence, whole
from ddp_patch.samplers.classes import Classes, Labels
from ddp_patch.samplers.passes import KeyedSampler, Positions, ResumableSampler, Stateful, check_number
from ddp_patch.samplers.scalable import ScalableRandomSampler
from ddp_patch.streams.generators import RandomGenerator, generator_state, set_generator_state
from ddp_patch.streams.random_access import is_random_access
from ddp_patch.streams.seeding import ambient_state, ambient_unmoved

__all__ = ["GroupedBatchSampler", "aspect_ratio_groups"]


class GroupedBatchSampler(ResumableSampler[list[int]]):
    """Batches of samples from one group each, in the wrapped sampler's order as far as that goes.

    The samples of a group stand in the batches in the sampler's order, and the batches come in the order of their
    first samples. An epoch of the sampler is drawn as a whole.

    Where the sampler's epochs have other indices each, as when it draws with replacement, the number of batches differs
    by epoch: ``len()`` is that of the pass that is running, or of the next one, which a copy of the sampler draws from
    its generators as they are now. That is known beforehand where the order follows from a seed or an epoch, in a
    patched loader, and where nobody else draws from that generator in between. An unpatched ``DataLoader`` does: its
    workers' seed, from torch's global generator or its own.

    A state can be told in the middle of a pass unless the wrapped sampler drew that pass from the global generators;
    ours without a seed can.

    Args:
        sampler: Indices into ``group_ids``: a sampler, or any iterable that ends.
        group_ids: For each sample of the dataset the group that it is in, of any hashable type.
        batch_size: How many samples a batch has.
        drop_uneven: Leave out batches with fewer samples, the last of each group; else they come in their place.

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
        self.batch_size: int = whole("batch_size", batch_size, 1, "a batch has so many samples")
        self.drop_uneven: bool = flag("drop_uneven", drop_uneven, "batches with fewer samples are left out or come")
        _require_groups_for_all(sampler, len(self._groups.codes))
        self._length = 0  # of the latest pass
        self._begun: dict[str, Any] | None = None  # what the latest pass follows from, if that can be told
        self._latest: tuple[int, Batches] | None = None

    @property
    def drop_last(self) -> bool:
        """``drop_uneven``, by the name that torch has for it."""
        return self.drop_uneven

    @property
    def epoch(self) -> int:
        """The wrapped sampler's, or 0 where it has none."""
        epoch = getattr(self.sampler, "epoch", 0)
        return epoch if isinstance(epoch, int) and epoch >= 0 else 0

    @property
    def has_random_access(self) -> bool:
        """Whether any part of any epoch can be looked up: where the wrapped sampler is one of these, with a seed."""
        return self._keyed is not None

    @property
    def _keyed(self) -> KeyedSampler[int] | None:
        return self.sampler if is_random_access(self.sampler) and isinstance(self.sampler, KeyedSampler) else None

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one of the wrapped sampler."""
        # A pass that was loaded is still to come; of which epoch it is, only the wrapped sampler can say.
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
        with ambient_unmoved():
            return self._number(_copied(self.sampler))

    def _number(self, drawn: Iterable[int]) -> int:
        return len(self._cut(self._group_of(self._indices(drawn)))[0])

    def items_at(self, positions: Positions, epoch: int) -> list[list[int]]:
        """Return the batches at some positions of an epoch.

        Args:
            positions: Positions of batches, in any order and number.
            epoch: From 0.

        Raises:
            SamplerError: The wrapped sampler cannot be looked up.
        """
        if self._keyed is None:
            raise SamplerError(
                f"GroupedBatchSampler.items_at() was called over a {type(self.sampler).__name__}, which is iterated "
                "and not looked up. Give it a sampler of ddp_patch.samplers with seed=, or iterate it."
            )
        return self._epoch(self._keyed, epoch)(positions)

    def _epoch(self, sampler: KeyedSampler[int], epoch: int) -> Batches:
        if self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, self._grouped(self._indices(sampler.items_at(np.arange(len(sampler)), epoch)))
        return self._latest[1]

    def _begin(self, skip: int) -> Iterator[Sequence[list[int]]]:
        before, ambient = self._state(in_pass=False), ambient_state()
        batches = self._grouped(self._indices(self.sampler))
        if isinstance(self.sampler, KeyedSampler):
            self._begun = before | {"sampler": self.sampler.state_of_latest_pass()}
        else:  # which draws the pass again
            self._begun = before if ambient_state() == ambient else None
        self._length = len(batches)
        return self._looked_up(batches, skip, self._length)

    def _indices(self, drawn: Iterable[Any]) -> npt.NDArray[np.integer[Any]]:
        """What the wrapped sampler gave, in an array."""
        if isinstance(drawn, np.ndarray) and drawn.ndim == 1 and drawn.dtype.kind in "iu":
            return drawn
        found = drawn.tolist() if isinstance(drawn, np.ndarray) else list(drawn)
        try:
            return np.fromiter(map(operator.index, found), np.int64, len(found))
        except (TypeError, OverflowError) as error:
            raise SamplerError(
                f"{type(self.sampler).__name__} gave something else than a whole number ({error}): group_ids is looked "
                "up by index. Give GroupedBatchSampler a sampler of indices."
            ) from error

    def _group_of(self, indices: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
        groups = self._groups.codes
        if len(odd := np.flatnonzero((indices < 0) | (indices >= len(groups)))):
            raise SamplerError(
                f"{type(self.sampler).__name__} gave the index {indices[odd[0]]}, and group_ids has {len(groups)} "
                "entries: that sample is in no group. Pass one group for each sample of the dataset."
            )
        return np.take(groups, indices)

    def _cut(self, group_of: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return where the batches begin and end, when the samples stand group by group."""
        sizes = np.bincount(group_of, minlength=len(self._groups.labels))
        starts, stops = cut(sizes, self.batch_size)
        kept = stops - starts == self.batch_size if self.drop_uneven else slice(None)
        return starts[kept], stops[kept]

    def _grouped(self, indices: npt.NDArray[np.integer[Any]]) -> Batches:
        group_of = self._group_of(indices)
        places = np.argsort(group_of, kind="stable")  # group by group, in the sampler's order
        starts, stops = self._cut(group_of)
        return Batches(indices[places], starts, stops).ordered(np.argsort(places[starts]))

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        if in_pass and self._begun is None:
            raise SamplerError(
                f"GroupedBatchSampler.state_dict() was called in the middle of a pass which its "
                f"{type(self.sampler).__name__} drew from the global generators, so from no state could it be drawn "
                "again. Give that sampler generator=, wrap one of ddp_patch.samplers, or ask between two passes."
            )
        if in_pass and self._begun is not None:
            return self._begun
        sampler: Any = self.sampler
        is_stateful = isinstance(sampler, Stateful)
        epoch = None if is_stateful else getattr(sampler, "epoch", None)
        return {
            "epoch": epoch if isinstance(epoch, int) and epoch >= 0 else None,
            "sampler": getattr(sampler, "state_between_passes", sampler.state_dict)() if is_stateful else None,
            "generators": [generator_state(generator) for generator in self._generators()],
        }

    def _generators(self) -> list[RandomGenerator]:
        """What wrapped samplers draw from that say no state of their own."""
        return [
            value
            for nested in nested_samplers(self.sampler)
            if not isinstance(nested, Stateful)
            for value in getattr(nested, "__dict__", {}).values()
            if isinstance(value, RandomGenerator)
        ]

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state["epoch"] is not None:
            check_number(self, "epoch", state["epoch"], 0)
        here = self.state_between_passes()
        if (state["sampler"] is None) != (here["sampler"] is None) or len(state["generators"]) != len(
            here["generators"]
        ):
            raise SamplerError(
                "GroupedBatchSampler.load_state_dict() was given a state over another kind of sampler than its "
                f"{type(self.sampler).__name__}: one has a state_dict(), or a generator, and the other not. Wrap a "
                "sampler of the kind that was saved."
            )

    def _load_state(self, state: Mapping[str, Any]) -> None:
        if state["epoch"] is not None:
            tell_epoch(self.sampler, state["epoch"])
        for generator, told in zip(self._generators(), state["generators"], strict=True):
            set_generator_state(generator, told)
        if isinstance(self.sampler, Stateful):
            self.sampler.load_state_dict(state["sampler"])


def _require_groups_for_all(sampler: object, groups: int) -> None:
    """Refuse other group ids than those of the dataset, where the sampler knows it."""
    if isinstance(sampler, RandomSampler | SequentialSampler) and len(sampler.data_source) != groups:
        raise SamplerError(
            f"group_ids has {groups} entries, and the {type(sampler).__name__} is of a dataset with "
            f"{len(sampler.data_source)} samples: each is in one group. Pass one group for each sample of the dataset."
        )


def _fixed_indices(sampler: Iterable[int]) -> Iterable[int] | None:
    """The indices that every epoch has, in any order; None where epochs may have others."""
    if type(sampler) is RandomSampler:
        whole_epoch = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return np.arange(len(sampler.data_source)) if whole_epoch else None
    if type(sampler) is SequentialSampler:
        return np.arange(len(sampler.data_source))
    if type(sampler) is ScalableRandomSampler:
        return np.arange(len(sampler))
    if type(sampler) is SubsetRandomSampler:
        return sampler.indices
    return sampler if type(sampler) in (list, tuple, range, np.ndarray, torch.Tensor) else None


def _copied(sampler: Iterable[int]) -> Iterable[int]:
    """Return a copy to be drawn from, which shares datasets with the sampler."""
    values = [value for nested in nested_samplers(sampler) for value in getattr(nested, "__dict__", {}).values()]
    return copy.deepcopy(sampler, {id(value): value for value in values if isinstance(value, Dataset)})


def aspect_ratio_groups(
    widths: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
    heights: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
    edges: Sequence[float] = (1.0,),
) -> npt.NDArray[np.int64]:
    """Return for each picture the number of the interval that its aspect ratio, width / height, is in.

    Args:
        widths: Of the pictures, in any unit.
        heights: Of the pictures, in the same unit.
        edges: Where one interval ends and the next begins, increasing; an edge belongs to the upper one. By default
            upright pictures are 0, and square and wide ones 1.

    Returns:
        Numbers from 0 to ``len(edges)``, shape ``(pictures,)``.

    Raises:
        SamplerError: A size is not above 0, the edges do not increase, or there are more widths than heights or fewer.

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
