"""Real gloo ranks, each seeded differently, train what one process trains: the demo's table, and more options."""

from typing import Any

import pytest
from quick import run_ranks
from torch import Tensor
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp

OPTIONS: list[dict[str, Any]] = [{"uneven": "keep"}, {"order": "leader"}]


def with_options(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    import digits

    seed_ambient(rank)
    return [
        {
            name: digits.Training(
                patch_dataloader_to_ddp(loader, share="within_batches", seed=digits.SEED, **options)
            ).finish()
            for name, loader in digits.make_loaders().items()
            if not (name in digits.SAMPLES_ALONE and "order" in options)  # an iterable dataset has no leader
        }
        for options in OPTIONS
    ]


@pytest.mark.soak  # the demo, which CI runs, trains with the usual options
def test_other_options_train_the_same() -> None:
    import digits

    alone = digits.train_alone(1)
    for trained in run_ranks(with_options, 3):
        for by_loader in trained:
            for name, parameters in by_loader.items():
                assert (parameters - alone[name]).abs().max() < digits.TOLERANCE
