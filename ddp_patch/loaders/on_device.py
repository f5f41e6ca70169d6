"""Loaders that put batches on a device: which ones can, and whether the next batch is copied ahead."""

from typing import Any, Final, TypeVar

import torch
from torch.utils.data import DataLoader

from ddp_patch.compat.torch_loaders import MAKE_ITERATOR, has_own_iteration, has_own_iterators, torchdata_batch_sampler
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.copying import copies_plainly, copy_loader
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.loaders.moving import streams_of
from ddp_patch.options import Options

__all__ = ["ON_DEVICE", "copies_ahead", "device_for", "device_of", "require_movable", "without_device"]

L = TypeVar("L", bound=DataLoader[Any])

# The attribute of a loader whose batches come on a device.
ON_DEVICE: Final = "_ddp_patch_device"


def device_of(loader: DataLoader[Any]) -> torch.device | None:
    """Return the device on which a loader's batches come by ``device=``; None if they come as they are."""
    found: torch.device | None = getattr(loader, ON_DEVICE, None)
    return found


def device_for(facts: LoaderFacts[Any], options: Options) -> torch.device | None:
    """Return the device on which a patched loader's batches come: the one asked for, or else where they come already.

    Args:
        facts: The loader that is to be patched.
        options: What the user chose, with "auto" resolved.
    """
    return options.device if isinstance(options.device, torch.device) else device_of(facts.loader)


def without_device(loader: L, **replaced: Any) -> L:
    """Return a copy of a loader with other attributes, whose batches come as its class makes them."""
    plain = copy_loader(loader, **replaced)
    if vars(plain).pop(ON_DEVICE, None) is not None:
        vars(plain).pop(MAKE_ITERATOR, None)
    return plain


def copies_ahead(facts: LoaderFacts[Any], options: Options) -> bool:
    """Return whether a batch is copied to the device while the training loop works on the one before.

    The random numbers of the main process stay those that they are without a device. So it takes workers, which make
    the batch elsewhere; and another agreement than ``"ambient"``, with which samplers draw between the loop's steps. It
    takes torch's own iterators, because others count what is taken from them. And where ranks hand each other batches,
    one that copies ahead could wait for one that does not.
    """
    device, kind = device_for(facts, options), type(facts.loader)
    return (
        device is not None
        and streams_of(device) is not None
        and facts.num_workers > 0
        and options.agreement != "ambient"
        and facts.repeater is None
        and not has_own_iterators(kind)
        and torchdata_batch_sampler(kind) is None
        and not (facts.level is Level.ITERABLE and options.iterable_sharding == "by_worker")
    )


def require_movable(facts: LoaderFacts[Any], device: torch.device) -> None:
    """Refuse a loader whose batches cannot be put on a device before its user gets them.

    Raises:
        InvalidOptionError: Its class iterates or copies in its own way, or is not torch's.
    """
    kind = type(facts.loader)
    # accelerate's wrappers pass isinstance() without being DataLoaders.
    is_torchs = issubclass(kind, DataLoader) and not has_own_iteration(kind)
    if not is_torchs and (facts.repeater is None or facts.sharded_by is not None):
        raise InvalidOptionError(
            f"device='{device}' does not work with a {kind.__name__}: it iterates in its own way, so batches cannot "
            "be moved before they come to the loop. Leave device= out, and call .to(device) there."
        )
    if not copies_plainly(kind):
        raise InvalidOptionError(
            f"device='{device}' does not work with a {kind.__name__}: it is copied in its own way, so a copy would "
            "iterate the original loader. Leave device= out, and call .to(device) in the loop."
        )
