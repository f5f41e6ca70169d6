"""TRL's sampler for groups of answers to one prompt."""

from typing import Any

from trl.trainer.utils import RepeatSampler

from third_party.base import Case, Numbers, drawn_by


def repeated(shuffle: bool) -> Any:
    sampler = RepeatSampler(Numbers(21), mini_repeat_count=4, batch_size=3, repeat_count=2, shuffle=shuffle, seed=5)
    return drawn_by(sampler, 21, 12)


CASES = [
    Case("trl", "`RepeatSampler`, shuffled", lambda world: repeated(shuffle=True), whole=True),
    Case("trl", "`RepeatSampler`, in order", lambda world: repeated(shuffle=False), whole=True),
]
