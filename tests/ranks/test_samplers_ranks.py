"""Class-balanced sampling on real ranks: a rare digit is learnt there as it is in one process."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from quick import run_ranks, soaked
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.samplers import WeightedClassSampler

RARE, KEPT, LENGTH, BATCH, SEED = 8, 15, 1200, 40, 7


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Digits to train on, with few of the rare one, and to evaluate on, with all that are left of it."""
    from sklearn.datasets import load_digits  # which imports much: see tests/frozen.py

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    is_rare = (labels == RARE).nonzero()[:, 0]
    others = (labels != RARE).nonzero()[:, 0]
    train, evaluation = torch.cat([is_rare[:KEPT], others[:1300]]), torch.cat([is_rare[KEPT:], others[1300:]])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[evaluation], labels[evaluation])


def sampler(is_balanced: bool) -> Sampler[int]:
    train, _ = digits()
    if is_balanced:
        return WeightedClassSampler.n_per_class(train.tensors[1], LENGTH // 10)
    return RandomSampler(train, num_samples=LENGTH)


def recall(rank: int, world_size: int, is_balanced: bool) -> float:
    """Train on all ranks; return which part of the rare digits is recognised."""
    train, evaluation = digits()
    torch.manual_seed(100 + rank)  # every rank differently
    given = DataLoader(train, BATCH // world_size, sampler=sampler(is_balanced))
    explicit: Any = {"rank": 0, "num_replicas": 1} if world_size == 1 else {}
    loader = patch_dataloader_to_ddp(given, seed=SEED, **explicit)
    torch.manual_seed(SEED)
    model: nn.Module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    trained = model if world_size == 1 else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(images), labels).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
    with torch.no_grad():
        images, labels = evaluation.tensors
        right = model(images).argmax(dim=1) == labels
    return float(right[labels == RARE].float().mean())


def recalls(rank: int, world_size: int) -> tuple[float, float]:
    return recall(rank, world_size, is_balanced=False), recall(rank, world_size, is_balanced=True)


@pytest.mark.parametrize("world_size", [2, soaked(4)])
def test_the_rare_class_is_learnt_as_in_one_process(world_size: int) -> None:
    alone = recalls(0, 1)
    ranks = run_ranks(recalls, world_size)
    assert alone[1] > alone[0] + 0.2
    for plain, balanced in ranks:
        assert balanced > plain + 0.2
        assert np.allclose((plain, balanced), alone, atol=0.03)  # sums of gradients are rounded in another order


def classes_by_rank(rank: int, world_size: int) -> list[list[int]]:
    train, _ = digits()
    torch.manual_seed(100 + rank)
    given = DataLoader(train, BATCH, sampler=sampler(is_balanced=True))
    loader = patch_dataloader_to_ddp(given)
    return [torch.cat([labels for _, labels in loader]).tolist() for _ in range(2)]


def test_the_ranks_together_see_exactly_the_balance() -> None:
    ranks = run_ranks(classes_by_rank, 3)
    for epoch in range(2):
        together = np.concatenate([epochs[epoch] for epochs in ranks])
        assert np.bincount(together).tolist() == [LENGTH // 10] * 10
