"""Real gloo ranks, each seeded differently, train what one process trains: the demo's table, and more options."""

from typing import Any

import digits
import pytest
from quick import run_ranks
from torch import Tensor
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp

OPTIONS: list[dict[str, Any]] = [{"uneven": "keep"}, {"layout": "contiguous"}, {"agreement": "leader"}]
DIGITS = list(digits.make_loaders())


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[float]]]:
    return digits.differences()


def largest(by_loader: dict[str, list[float]]) -> float:
    return max(max(differences) for differences in by_loader.values())


def test_divided_batches_train_what_one_process_trains(found: dict[str, dict[str, list[float]]]) -> None:
    assert list(found["within_batches"]) == DIGITS
    assert largest(found["within_batches"]) < digits.TOLERANCE


def test_so_they_do_after_a_kill_and_on_other_ranks(found: dict[str, dict[str, list[float]]]) -> None:
    assert set(digits.WORLDS) > {digits.KILLED_WORLD}
    assert list(found[digits.RESUMED]) == DIGITS
    assert largest(found[digits.RESUMED]) < digits.TOLERANCE


def test_a_batch_for_each_rank_trains_what_one_process_trains_with_larger_batches(
    found: dict[str, dict[str, list[float]]],
) -> None:
    assert set(found["samples"]) | set(found["batches"]) == set(DIGITS)
    assert largest(found["samples"]) < digits.TOLERANCE
    assert largest(found["batches"]) < digits.TOLERANCE


def test_without_weights_none_of_them_does(found: dict[str, dict[str, list[float]]]) -> None:
    assert list(found[digits.PLAIN]) == DIGITS
    assert min(min(differences) for differences in found[digits.PLAIN].values()) > 1e-6


def with_options(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    seed_ambient(rank)
    return [
        {
            name: digits.Training(
                patch_dataloader_to_ddp(loader, share="within_batches", seed=digits.SEED, **options)
            ).finish()
            for name, loader in digits.make_loaders().items()
            if not (name in digits.SAMPLES_ALONE and "agreement" in options)  # an iterable dataset has no leader
        }
        for options in OPTIONS
    ]


def test_other_options_train_the_same() -> None:
    alone = digits.train_alone(1)
    for trained in run_ranks(with_options, 3):
        for by_loader in trained:
            for name, parameters in by_loader.items():
                assert (parameters - alone[name]).abs().max() < digits.TOLERANCE
