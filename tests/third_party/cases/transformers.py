"""The samplers of Hugging Face's Trainer."""

from typing import Any

from torch.utils.data import DataLoader, Sampler
from transformers.trainer_pt_utils import DistributedLengthGroupedSampler, LengthGroupedSampler

from third_party.base import Case, Fate, N, Numbers, World

LENGTHS = [index * 7 % N + 1 for index in range(N)]


def drawn_by(sampler: Sampler[int]) -> DataLoader[int]:
    return DataLoader(Numbers(), 4, sampler=sampler)


def by_length(world: World) -> Any:
    return drawn_by(LengthGroupedSampler(4, lengths=LENGTHS))


def by_length_distributed(world: World) -> Any:
    return drawn_by(DistributedLengthGroupedSampler(4, num_replicas=world.size, rank=world.rank, lengths=LENGTHS))


CASES = [
    Case("transformers", "`LengthGroupedSampler`", by_length),
    Case("transformers", "`DistributedLengthGroupedSampler`", by_length_distributed, Fate.AS_IT_IS),
]
