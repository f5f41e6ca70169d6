"""pytorch-metric-learning's samplers."""

from functools import partial
from typing import Any

import numpy as np
from pytorch_metric_learning.samplers import FixedSetOfTriplets, HierarchicalSampler, MPerClassSampler
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, drawn_by

N = 60
LABELS = np.arange(N) % 10
OF_TWO_LEVELS = np.stack([LABELS, LABELS % 3], axis=1)


def seeded(loader: Any, options: dict[str, Any]) -> Any:
    seed_ambient(100)  # as the one process is with which the ranks are compared
    return patch_dataloader_to_ddp(drawn_by(FixedSetOfTriplets(LABELS, num_triplets=21), N, 3), **options)


case = partial(Case, "pytorch-metric-learning", whole=True)
CASES = [
    case(
        "`MPerClassSampler(batch_size=...)`",
        lambda world: drawn_by(MPerClassSampler(LABELS, m=4, batch_size=12, length_before_new_iter=84), N, 12),
    ),
    case(
        "`MPerClassSampler`", lambda world: drawn_by(MPerClassSampler(LABELS, m=4, length_before_new_iter=120), N, 12)
    ),
    case(
        "`HierarchicalSampler`",
        lambda world: drawn_by(
            n=N, batch_sampler=HierarchicalSampler(OF_TWO_LEVELS, batch_size=12, samples_per_class=3)
        ),
    ),
    case(  # whose constructor draws them
        "`FixedSetOfTriplets`, of ranks that are seeded differently",
        lambda world: drawn_by(FixedSetOfTriplets(LABELS, num_triplets=21), N, 3),
        Fate.REFUSED,
        on_ranks=True,
        remedy=seeded,
        told="seed what it draws from",
    ),
]
