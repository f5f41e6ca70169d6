"""pytorch-metric-learning's samplers."""

from typing import Any

import numpy as np
from pytorch_metric_learning.samplers import FixedSetOfTriplets, HierarchicalSampler, MPerClassSampler
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, Numbers, World

PACKAGE = "pytorch-metric-learning"
N = 60
LABELS = np.arange(N) % 10


def drawn_by(sampler: Any) -> DataLoader[int]:
    return DataLoader(Numbers(N), 12, sampler=sampler)


def m_per_class(world: World) -> Any:
    return drawn_by(MPerClassSampler(LABELS, m=4, batch_size=12, length_before_new_iter=84))


def m_per_class_without_batch_size(world: World) -> Any:
    return drawn_by(MPerClassSampler(LABELS, m=4, length_before_new_iter=120))


def hierarchical(world: World) -> Any:
    labels = np.stack([LABELS, LABELS % 3], axis=1)
    return DataLoader(Numbers(N), batch_sampler=HierarchicalSampler(labels, batch_size=12, samples_per_class=3))


def triplets(world: World) -> Any:
    """The constructor draws them, on each rank others."""
    sampler = FixedSetOfTriplets(LABELS, num_triplets=21)
    return DataLoader(Numbers(N), 3, sampler=sampler)


def led(loader: Any, options: dict[str, Any]) -> Any:
    return patch_dataloader_to_ddp(loader, order="leader", **options)


CASES = [
    Case(PACKAGE, "`MPerClassSampler(batch_size=...)`", m_per_class, whole=True),
    Case(PACKAGE, "`MPerClassSampler`", m_per_class_without_batch_size, whole=True),
    Case(PACKAGE, "`HierarchicalSampler`", hierarchical, whole=True),
    Case(
        PACKAGE,
        "`FixedSetOfTriplets`, of ranks that are seeded differently",
        triplets,
        Fate.REFUSED,
        whole=True,
        on_ranks=True,
        remedy=led,
        told="order='leader'",
    ),
]
