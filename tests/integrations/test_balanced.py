"""``cost=`` under accelerate and torchdata, which take the loader as it is. ``test_lightning.py`` has Lightning."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import accelerate
import pytest
from preparing import ways_to_prepare
from quick import run_ranks
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from zoo import Indices, N, TokenBatches, as_it_is, seed_ambient

from ddp_patch import Cost, patch_dataloader_to_ddp

# torchdata 0.11 calls it in the constructor of every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

LOADERS: dict[str, Callable[..., Any]] = {
    "shuffled": lambda kind, **options: kind(Indices(), 2, sampler=RandomSampler(range(N)), **options),
    "drawn": lambda kind, **options: kind(Indices(), 2, sampler=[*range(N)], **options),
    "batch sampler": lambda kind, **options: kind(Indices(), batch_sampler=TokenBatches(), **options),
    "own class": lambda kind, **options: kind(Indices(), batch_sampler=OwnBatches(range(N), 3, False), **options),
}


class OwnBatches(BatchSampler):
    """A batch sampler of the user's own."""


# Rows are gathered batch by batch.
SHARED_WHOLE = {"batch sampler", "own class"}


def balanced(
    make: Callable[..., Any], kind: type[Any], rank: int | None = None, ambient: int = 7, **options: Any
) -> Any:
    seed_ambient(ambient)  # torchdata's sampler draws its own generator's seed when it is made
    given = make(kind, collate_fn=as_it_is, **options)
    world: dict[str, Any] = {} if rank is None else {"rank": rank, "num_replicas": 2}
    return patch_dataloader_to_ddp(given, seed=3, cost=Cost(float, window=2), timeout=60, **world)


def by_accelerate(rank: int, world_size: int) -> dict[str, list[Any]]:
    accelerator = accelerate.Accelerator(cpu=True)
    found = {}
    for name, make in LOADERS.items():
        for way, prepare in ways_to_prepare(accelerator).items():
            found[f"{name}, {way}"] = list(prepare(balanced(make, DataLoader, ambient=rank)))
    return found


def test_accelerate_takes_balanced_batches_as_they_are() -> None:
    ranks = run_ranks(by_accelerate, 2)
    for name, of_ranks in ((name, [found[name] for found in ranks]) for name in ranks[0]):
        make = LOADERS[name.split(", ")[0]]
        assert of_ranks == [list(balanced(make, DataLoader, rank)) for rank in range(2)], name
        assert {row for batches in of_ranks for batch in batches for row in batch} == set(range(N)), name


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_torchdatas_own_state_is_exact(name: str, workers: int) -> None:
    make = partial(balanced, LOADERS[name], StatefulDataLoader, 1, num_workers=workers)
    running = make()
    whole = [list(running), list(running)]
    for batches in (1, 3):
        stopped = make()
        assert list(islice(stopped, batches)) == whole[0][:batches]
        resumed = make()
        resumed.load_state_dict(stopped.state_dict())
        assert [list(resumed), list(resumed)] == [whole[0][batches:], whole[1]]
