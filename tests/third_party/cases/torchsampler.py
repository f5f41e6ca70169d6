"""torchsampler's sampler for imbalanced data sets."""

from typing import Any

from torch.utils.data import DataLoader
from torchsampler import ImbalancedDatasetSampler

from third_party.base import Case, N, Numbers, World


def balanced(world: World) -> Any:
    labels = [int(index < 4) for index in range(N)]
    return DataLoader(Numbers(), 4, sampler=ImbalancedDatasetSampler(Numbers(), labels=labels))


CASES = [Case("torchsampler", "`ImbalancedDatasetSampler`", balanced)]
