"""What every rank gets, and that the training asks for it."""

from typing import Any

from my_project.loaders import distributed_loaders, make_loaders

from ddp_patch import assert_loaders_patched
from ddp_patch.testing import run_ranks


def test_every_rank_gets_its_share(ddp_audit: Any) -> None:
    loaders = make_loaders()
    ddp_audit(loaders["train"], world_size=8, epochs_differ=True)
    ddp_audit(loaders["val"], world_size=8, uneven="keep", padding=False)


def batches_of_one_epoch(rank: int, world_size: int) -> dict[str, int]:
    loaders = distributed_loaders()
    assert_loaders_patched(loaders)
    return {name: sum(1 for _ in loader) for name, loader in loaders.items()}


def test_the_training_patches_its_loaders() -> None:
    assert run_ranks(batches_of_one_epoch, 2) == [{"train": 31, "val": 4}] * 2
