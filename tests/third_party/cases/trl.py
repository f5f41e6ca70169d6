"""TRL's sampler for groups of answers to one prompt."""

from typing import Any

from torch.utils.data import DataLoader
from trl.trainer.utils import RepeatSampler

from third_party.base import Case, Numbers, World


def repeated(shuffle: bool) -> Any:
    sampler = RepeatSampler(Numbers(21), mini_repeat_count=4, batch_size=3, repeat_count=2, shuffle=shuffle, seed=5)
    return DataLoader(Numbers(21), batch_size=12, sampler=sampler)


def in_order(world: World) -> Any:
    return repeated(shuffle=False)


def shuffled(world: World) -> Any:
    return repeated(shuffle=True)


CASES = [
    Case("trl", "`RepeatSampler`, shuffled", shuffled, whole=True),
    Case("trl", "`RepeatSampler`, in order", in_order, whole=True),
]
