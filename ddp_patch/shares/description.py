"""A patched loader in a line of text: which shard it gives, of what, and in how many steps."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.loaders.samples import length_of
from ddp_patch.options import Options
from ddp_patch.shares.epochs import EpochSampler

__all__ = ["describe_share"]

# They change no share, or another part of the text tells them.
_UNTOLD = {"share", "timeout", "cost", "cost_window"}


def describe_share(loader: DataLoader[Any]) -> str | None:
    """Return what a loader gives this rank, as ``repr(loader)`` says it; None if this package did not patch it.

    Shards are counted from 0, as ranks are. Only options that are not the default are named.

    Examples:
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = DataLoader(range(100), batch_size=8)
        >>> describe_share(patch_dataloader_to_ddp(loader, rank=1, num_replicas=4))
        'shard 1 of 4, samples, 4 steps of 8'
        >>> patch_dataloader_to_ddp(loader, rank=1, num_replicas=4, uneven="drop")
        <torch.utils.data.dataloader.DataLoader: shard 1 of 4, samples, 4 steps of 8, uneven='drop'>
    """
    # No more than a look: repr() may come at any moment, of loaders that are not ours or not yet made.
    sampler = vars(loader).get("sampler")
    if not isinstance(sampler, EpochSampler):
        return None
    options, size = sampler.agreed.options, loader.batch_size
    shard = f"shard {sampler.rank} of {sampler.num_replicas}"
    if options.divides_batches:
        parts = [f"a part of each batch{f' of {size}' if size else ''}", _steps(loader)]
    else:
        parts = [_unit(loader, sampler), _steps(loader) + (f" of {size}" if size else "")]
    return ", ".join([shard, *parts, *_chosen(options)])


def _unit(loader: DataLoader[Any], sampler: EpochSampler[Any]) -> str:
    """Return what is sharded."""
    if loader.batch_sampler is sampler:
        return "whole batches"
    unit = "samples" if loader.batch_size else "items"
    return f"{unit} of a stream" if isinstance(loader.dataset, IterableDataset) else unit


def _steps(loader: DataLoader[Any]) -> str:
    steps = length_of(loader, ())
    return "steps" if steps is None else f"{steps:,} step{'' if steps == 1 else 's'}"


def _chosen(options: Options) -> Iterator[str]:
    """Yield the options that are not the default."""
    if options.costs is not None:
        yield "steps of equal cost"
    default = Options(agreement="seeded")  # which "auto" mostly comes to
    for name in (field.name for field in fields(options) if field.name not in _UNTOLD):
        if (value := getattr(options, name)) != getattr(default, name):
            yield f"{name}={_shown(value)!r}"


def _shown(value: object) -> object:
    return str(value) if isinstance(value, torch.device) else value
