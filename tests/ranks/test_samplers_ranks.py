"""Class-balanced sampling on real ranks, which are seeded differently: together they see exactly the balance."""

from collections import Counter
from typing import Any

import torch
from quick import run_ranks
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.samplers import WeightedClassSampler

LABELS, EACH = torch.tensor([0] * 500 + [1] * 40 + [2] * 15), 120


def classes_by_rank(rank: int, world_size: int) -> list[list[int]]:
    torch.manual_seed(100 + rank)
    given: DataLoader[Any] = DataLoader(
        TensorDataset(LABELS), 40, sampler=WeightedClassSampler.n_per_class(LABELS, EACH)
    )
    loader = patch_dataloader_to_ddp(given)
    return [torch.cat([labels for (labels,) in loader]).tolist() for _ in range(2)]


def test_the_ranks_together_see_exactly_the_balance() -> None:
    ranks = run_ranks(classes_by_rank, 3)
    for epoch in range(2):
        assert Counter(label for epochs in ranks for label in epochs[epoch]) == dict.fromkeys(range(3), EACH)
