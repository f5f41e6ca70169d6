"""accelerate's sampler, and the loaders that it prepared."""

from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler

from third_party.base import Case, Fate, Numbers, World, drawn_by


def prepared(world: World) -> Any:
    return Accelerator(cpu=True).prepare(drawn_by())


CASES = [
    Case(
        "accelerate", "`SeedableRandomSampler`", lambda world: drawn_by(SeedableRandomSampler(Numbers(), data_seed=5))
    ),
    Case("accelerate", "`accelerator.prepare(loader)`", prepared, Fate.AS_IT_IS, on_ranks=True, repeats=True),
]
