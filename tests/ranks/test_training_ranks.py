"""Real gloo ranks, each seeded differently, train what one process trains: the demo's table, and more options."""

from typing import Any
from unittest import mock

import pytest
from quick import run_ranks
from torch import Tensor
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp

OPTIONS: list[dict[str, Any]] = [{"uneven": "keep"}, {"order": "leader"}]


@pytest.mark.soak  # the demo, which CI runs, is the same with 2, 3 and 4 ranks
def test_ranks_train_what_one_process_trains_also_after_a_kill_and_not_without_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import digits  # which imports much: see tests/frozen.py

    monkeypatch.setattr(digits, "WORLDS", (3,))
    with mock.patch("multiprocessing.set_forkserver_preload"):  # tests/quick.py has told what all ranks need
        found = digits.differences()
    loaders = set(digits.make_loaders())
    assert {way: set(by_loader) for way, by_loader in found.items()} == {
        "within_batches": loaders,
        "samples": loaders - digits.BATCHES_ALONE,
        "batches": loaders - digits.SAMPLES_ALONE,
        digits.RESUMED: loaders,
        digits.PLAIN: loaders,
    }
    ranks = sum(digits.WORLDS)
    assert {len(differences) for by_loader in found.values() for differences in by_loader.values()} == {ranks}
    without_weights = found.pop(digits.PLAIN)
    assert min(map(min, without_weights.values())) > 1e-6
    for way, by_loader in found.items():
        for loader, differences in by_loader.items():
            assert max(differences) < digits.TOLERANCE, (way, loader, differences)


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
