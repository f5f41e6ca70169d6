"""accelerate's sampler, and the loaders that it prepared."""

from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader

from third_party.base import Case, Fate, Numbers, World


def seedable(world: World) -> Any:
    return DataLoader(Numbers(), 4, sampler=SeedableRandomSampler(Numbers(), data_seed=5))


def prepared(world: World) -> Any:
    return Accelerator(cpu=True).prepare(DataLoader(Numbers(), 4))


CASES = [
    Case("accelerate", "`SeedableRandomSampler`", seedable),
    Case("accelerate", "`accelerator.prepare(loader)`", prepared, Fate.AS_IT_IS, on_ranks=True, repeats=True),
]
