"""Ray Train: ``ray.train.torch.prepare_data_loader``."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from ray.train.torch import prepare_data_loader, prepare_model

from ddp_patch import UnsupportedLoaderError, check_loaders_is_patched, loader_state, patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import Batch, tiny_model
from frameworks.loops import train
from frameworks.ray_launch import launch
from frameworks.tensors import NotedTensor

__all__ = ["FRAMEWORK"]


class Seen:
    """A loader of tensors, whose batches are seen as numbers."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return (numbers.as_batch() for numbers in self.loader)


def prepare(loader: Any, patched: bool) -> Any:
    """Have Ray prepare the loader, and look whether its wrapper is seen through."""
    prepared = prepare_data_loader(loader)
    assert check_loaders_is_patched(prepared)
    assert patch_dataloader_to_ddp(prepared) is prepared
    if patched:
        assert loader_state(prepared, batches_done=0) == loader_state(loader, batches_done=0)
    else:
        not_shared = prepare_data_loader(loader, add_dist_sampler=False)
        assert not check_loaders_is_patched(not_shared)
        with pytest.raises(UnsupportedLoaderError, match="_WrappedDataLoader cannot be patched"):
            patch_dataloader_to_ddp(not_shared)
    return prepared


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Prepare model and loader."""
    loader.collate_fn = NotedTensor.of
    if patched:
        loader = patch_dataloader_to_ddp(loader)
    else:
        epochs = range(len(epochs))  # as Ray's guide has it
    loader = prepare(loader, patched)
    model = prepare_model(tiny_model())
    return train(model, Seen(loader), epochs, set_epoch=lambda epoch: loader.sampler.set_epoch(epoch))


FRAMEWORK = Framework(("ray",), passes, moves=True, launch=launch)
