"""``share="within_batches"`` of torchdata's loader; ``test_training.py`` trains with it under frameworks."""

from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader
from zoo import Indices, PKBatches, Source, as_it_is, seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.plan import Plan

# torchdata 0.11 calls it in the constructor of every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

LOADERS: dict[str, Callable[..., Any]] = {
    "shuffled": lambda kind, workers: kind(Indices(), 5, shuffle=True, num_workers=workers, collate_fn=as_it_is),
    "batch sampler": lambda kind, workers: kind(
        Indices(), batch_sampler=PKBatches(), num_workers=workers, collate_fn=as_it_is
    ),
    "stream": lambda kind, workers: kind(Source(splits=True), 5, num_workers=workers, collate_fn=as_it_is),
}


def divided(make: Callable[[], Any], world_size: int, rank: int, **options: Any) -> Any:
    seed_ambient(7)  # torchdata's sampler draws its own generator's seed when it is made
    return patch_dataloader_to_ddp(make(), rank=rank, num_replicas=world_size, seed=3, **options)


def part(batch: list[Any], world_size: int, rank: int) -> list[Any]:
    return [batch[place] for place in chain(*Plan(rank, world_size).divide(len(batch)))]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_torchdatas_loader_resumes_exactly(name: str, workers: int) -> None:
    make = partial(LOADERS[name], StatefulDataLoader, workers)
    alone = divided(make, 1, 0, share="within_batches")
    whole = [[part(batch, 2, 1) for batch in alone] for _ in range(2)]
    for batches in (1, 3):
        stopped = divided(make, 2, 1, share="within_batches")
        assert list(islice(stopped, batches)) == whole[0][:batches]
        resumed = divided(make, 2, 1, share="within_batches")
        resumed.load_state_dict(stopped.state_dict())
        assert [list(resumed), list(resumed)] == [whole[0][batches:], whole[1]]
