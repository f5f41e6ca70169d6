"""Lightning's loader of several."""

from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Batch, Case, Fate, Numbers, World


def combined(world: World) -> Any:
    loaders = {name: DataLoader(Numbers(24), batch_size=4, shuffle=True) for name in ("a", "b")}
    return CombinedLoader(loaders, "sequential")


def patch_each(outer: Any, options: dict[str, Any]) -> Any:
    return CombinedLoader(
        {name: patch_dataloader_to_ddp(loader, **options) for name, loader in outer.iterables.items()}, "sequential"
    )


def numbers(batch: Any) -> Batch:
    """The batch of one of the loaders."""
    return tuple(batch[0].tolist())


CASES = [
    Case(
        "lightning",
        "`CombinedLoader`",
        combined,
        Fate.REFUSED,
        numbers,
        remedy=patch_each,
        told="outer.flattened = [patch_dataloader_to_ddp(loader) for loader in outer.flattened]",
    )
]
