"""MMEngine's samplers, which read the process group."""

from typing import Any
from unittest.mock import patch

from mmengine.dataset import DefaultSampler, InfiniteSampler
from torch.utils.data import DataLoader

from third_party.base import Case, Fate, Numbers


def drawn_by(kind: Any, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), 4, sampler=kind(Numbers(), seed=5, **options))


def of_one_process(kind: Any) -> DataLoader[int]:
    """Make it where no other rank is known."""
    with patch("mmengine.dataset.sampler.get_dist_info", return_value=(0, 1)):
        return drawn_by(kind)


CASES = [
    Case("mmengine", "`DefaultSampler`", lambda world: drawn_by(DefaultSampler), Fate.AS_IT_IS, on_ranks=True),
    Case(
        "mmengine",
        "`DefaultSampler(round_up=False)`",
        lambda world: drawn_by(DefaultSampler, round_up=False),
        Fate.AS_IT_IS,
        on_ranks=True,
    ),
    Case(
        "mmengine",
        "`InfiniteSampler`",
        lambda world: drawn_by(InfiniteSampler),
        Fate.AS_IT_IS,
        steps=12,
        on_ranks=True,
    ),
    Case("mmengine", "`DefaultSampler`, of one process", lambda world: of_one_process(DefaultSampler)),
    Case("mmengine", "`InfiniteSampler`, of one process", lambda world: of_one_process(InfiniteSampler), steps=12),
]
