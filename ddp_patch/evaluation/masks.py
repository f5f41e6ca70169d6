"""Mark which samples of a batch are padding."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_patch.evaluation.one_stream import is_alone, require_one_stream
from ddp_patch.evaluation.steps import Steps, steps_alone, steps_of
from ddp_patch.loaders.on_device import device_of

__all__ = ["iter_with_mask"]

_MASKING = "iter_with_mask"


def iter_with_mask(loader: DataLoader[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each batch of a pass with a mask that is False on padding.

    Args:
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched one in a single process, which has no
            padding.

    Yields:
        The batch and its mask, a bool tensor of shape [samples], or of shape [] with ``batch_size=None``. It is on the
        loader's ``device=``, if it has one, else on the CPU.

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
    if is_alone(_MASKING, loader):
        return _masked(steps_alone(_MASKING, loader), loader)
    batches = require_one_stream(_MASKING, loader)
    return _masked(steps_of(_MASKING, loader, batches), loader)


def _masked(steps: Steps, loader: DataLoader[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    is_unbatched, device = loader.batch_sampler is None, device_of(loader) or "cpu"
    for batch, step in steps:
        mask = torch.arange(step.items, device=device) < step.real
        yield batch, mask[0] if is_unbatched else mask
