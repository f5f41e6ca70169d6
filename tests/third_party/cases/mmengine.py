"""MMEngine's samplers, which read the process group."""

from typing import Any
from unittest.mock import patch

from mmengine.dataset import DefaultSampler, InfiniteSampler

from third_party.base import Case, Fate, Numbers, drawn_by


def drawn(kind: Any, **options: Any) -> Any:
    return drawn_by(kind(Numbers(), seed=5, **options))


def of_one_process(kind: Any) -> Any:
    """Make it where no other rank is known."""
    with patch("mmengine.dataset.sampler.get_dist_info", return_value=(0, 1)):
        return drawn(kind)


def kept(name: str, make: Any, **how: Any) -> Case:
    return Case("mmengine", name, make, Fate.AS_IT_IS, on_ranks=True, **how)


CASES = [
    kept("`DefaultSampler`", lambda world: drawn(DefaultSampler)),
    kept("`DefaultSampler(round_up=False)`", lambda world: drawn(DefaultSampler, round_up=False)),
    kept("`InfiniteSampler`", lambda world: drawn(InfiniteSampler), steps=12),
    Case("mmengine", "`DefaultSampler`, of one process", lambda world: of_one_process(DefaultSampler)),
    Case("mmengine", "`InfiniteSampler`, of one process", lambda world: of_one_process(InfiniteSampler), steps=12),
]
