"""ignite: ``idist.auto_dataloader``, which makes the loader from a dataset and its sampler."""

from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
from frameworks import ignite_engine
from frameworks.base import Epochs, Framework

from ddp_patch import extract_loader_parameters

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Have it make the loader where it is not to be patched; a patched one is there already."""
    if not patched:
        loader = auto(loader)
    return ignite_engine.passes(loader, patched, epochs)


def auto(loader: Any) -> Any:
    """Return what ``auto_dataloader`` makes of the arguments that a loader was made from."""
    options = extract_loader_parameters(loader, ignore_data_related_parameters=True)
    return idist.auto_dataloader(loader.dataset, **options)


FRAMEWORK = Framework(("pytorch-ignite",), passes, moves=False)
