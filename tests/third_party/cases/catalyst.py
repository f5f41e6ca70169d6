"""Catalyst's wrapper.

Its other samplers cannot be made under this torch: they call ``Sampler.__init__(data_source)``.
"""

from typing import Any

from catalyst.data.sampler import DistributedSamplerWrapper
from torch.utils.data import DataLoader, RandomSampler

from third_party.base import Case, Fate, Numbers, World


def wrapped(world: World) -> Any:
    sampler = DistributedSamplerWrapper(RandomSampler(Numbers()), world.size, world.rank)
    return DataLoader(Numbers(), 4, sampler=sampler)


CASES = [Case("catalyst", "`DistributedSamplerWrapper`", wrapped, Fate.AS_IT_IS, repeats=True)]
