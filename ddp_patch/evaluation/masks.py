"""Mark which samples of a batch are padding."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.evaluation.one_stream import is_alone, require_one_stream
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import Level, look_at
from ddp_patch.shares.batches import Batches
from ddp_patch.shares.passes import Pass

__all__ = ["iter_with_mask"]


def iter_with_mask(loader: DataLoader[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch of a pass with a mask that is False on padding.

    Args:
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched one in a single process, which has no
            padding.

    Yields:
        The batch and its mask, a bool tensor on the CPU of shape [samples], or of shape [] with ``batch_size=None``.

    Raises:
        NotPatchedError: The loader was not patched, and there are several ranks.
        UnsupportedLoaderError: It is unknown which samples a batch holds.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=1, num_replicas=2)
        >>> for batch, mask in iter_with_mask(loader):
        ...     print(batch.tolist(), mask.tolist())
        [1, 3] [True, True]
        [0] [False]
    """
    if is_alone(loader):
        return _all_real(loader)
    return _masked(loader, require_one_stream("iter_with_mask", loader))


def _masked(loader: DataLoader[Any], batches: Batches) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch with its mask, computed from its items' positions in this rank's share."""
    sampler = batches.sampler
    if sampler.given is not None and sampler.given.is_within:
        raise UnsupportedLoaderError(
            f"iter_with_mask was given a {type(loader).__name__} in the middle of epoch {sampler.epoch}, after "
            f"{sampler.given.batches} batches: it has one iterator for all epochs, and goes on after a break. Call "
            f"set_epoch({sampler.epoch}) first, to begin at the epoch's beginning."
        )
    is_unbatched = loader.batch_sampler is None
    sampler.keeps_sizes = batches.level is Level.BATCH
    try:
        for number, batch in enumerate(loader):
            if number == 0:
                one = cast("Pass[Any]", sampler.latest)
            mask = _mask(batches, one, number)
            yield batch, mask[0] if is_unbatched else mask
    finally:
        sampler.keeps_sizes = False


def _mask(batches: Batches, one: Pass[Any], number: int) -> torch.Tensor:
    """Return the mask of batch ``number`` of a pass, True for samples that are not padding."""
    turn = batches.sampler.turns(one, batches).turn(number)
    if (samples := one.next_size()) is not None:
        return torch.full((samples,), turn.real > 0)
    return torch.arange(turn.items) < turn.real


def _all_real(loader: DataLoader[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch of an unpatched loader with a mask that is True for all of it."""
    if loader.batch_sampler is None:
        for item in loader:
            yield item, torch.tensor(True)
        return
    facts = look_at(loader)
    if facts.repeater is not None or facts.iterator_in is not None:
        raise UnsupportedLoaderError(
            f"iter_with_mask counts samples in a copy of a loader that is not patched, and an iterator runs in this "
            f"{type(loader).__name__}, which a copy does not have. Patch it, in a single process with rank=0, "
            "num_replicas=1."
        )
    # Count samples before they are collated: a collated batch may have any type.
    for samples, batch in copy_loader(loader, collate_fn=_Counted(loader.collate_fn)):
        yield batch, torch.ones(samples, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class _Counted:
    """A ``collate_fn`` that returns the number of samples, then what the user's ``collate_fn`` returns."""

    collate_fn: Callable[[Any], Any]

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self.collate_fn(samples)
