"""Ray Train: ``ray.train.torch.prepare_data_loader``."""

from collections.abc import Sequence
from typing import Any

from messages import raises
from ray.train.torch import prepare_data_loader, prepare_model
from torch.utils.data import IterableDataset

from ddp_patch import check_loaders_is_patched, loader_state, patch_dataloader_to_ddp
from ddp_patch.errors import UnsupportedLoaderError
from frameworks.base import Epochs, Framework
from frameworks.kinds import tiny_model
from frameworks.loops import train
from frameworks.ray_launch import launch
from frameworks.tensors import NotedTensor, Seen

__all__ = ["FRAMEWORK"]


def look_at_what_ray_wraps(loader: Any) -> None:
    """Look whether Ray's wrapper is seen through: what it shards counts, and what it does not is refused."""
    if not isinstance(loader.dataset, IterableDataset):  # which Ray leaves to the user
        shared = prepare_data_loader(loader)
        assert check_loaders_is_patched(shared)
        assert patch_dataloader_to_ddp(shared) is shared
    not_shared = prepare_data_loader(loader, add_dist_sampler=False)
    assert not check_loaders_is_patched(not_shared)
    with raises(UnsupportedLoaderError, "_WrappedDataLoader", "loader first"):
        patch_dataloader_to_ddp(not_shared)


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Prepare model and loader."""
    loader.collate_fn = NotedTensor.of
    if patched:
        look_at_what_ray_wraps(loader)
        loader = patch_dataloader_to_ddp(loader)
        prepared = prepare_data_loader(loader)
        assert check_loaders_is_patched(prepared)
        assert patch_dataloader_to_ddp(prepared) is prepared
        assert loader_state(prepared, batches_done=0) == loader_state(loader, batches_done=0)
    else:
        prepared, epochs = prepare_data_loader(loader), range(len(epochs))  # as Ray's guide has it
    model = prepare_model(tiny_model())
    set_epoch = getattr(prepared.sampler, "set_epoch", None)  # what an iterable dataset's loader has not
    return train(model, Seen(prepared), epochs, set_epoch=set_epoch)


FRAMEWORK = Framework(("ray",), passes, moves=True, launch=launch)
