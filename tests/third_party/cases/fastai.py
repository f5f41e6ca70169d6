"""fastai's loaders, which are not torch's."""

from typing import Any

from fastai.data.load import DataLoader as FastaiDataLoader
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, World


def own(world: World) -> Any:
    return FastaiDataLoader(list(range(23)), bs=4, shuffle=True)


def torchs(outer: Any, options: dict[str, Any]) -> Any:
    """Make a loader of torch's of the same data set."""
    return patch_dataloader_to_ddp(DataLoader(outer.dataset, batch_size=outer.bs, shuffle=outer.shuffle), **options)


CASES = [Case("fastai", "`DataLoader`", own, Fate.REFUSED, remedy=torchs, told="torch.utils.data.DataLoader")]
