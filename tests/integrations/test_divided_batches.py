"""``share="within_batches"`` under accelerate, Lightning and torchdata, which take the loader as it is."""

from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from typing import Any

import accelerate
import lightning
import pytest
import torch
from preparing import ways_to_prepare
from quick import run_ranks
from torch.utils.data import DataLoader
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


def by_accelerate(rank: int, world_size: int) -> dict[str, list[Any]]:
    seed_ambient(rank)
    accelerator = accelerate.Accelerator(cpu=True)
    found = {}
    for name, make in LOADERS.items():
        for way, prepare in ways_to_prepare(accelerator).items():
            one = patch_dataloader_to_ddp(make(DataLoader, 0), seed=3, share="within_batches")
            found[f"{name}, {way}"] = list(prepare(one))
    return found


def test_accelerate_takes_divided_batches_as_they_are() -> None:
    for rank, found in enumerate(run_ranks(by_accelerate, 2)):
        for name, batches in found.items():
            alone = list(divided(partial(LOADERS[name.split(", ")[0]], DataLoader, 0), 1, 0))
            assert batches == [part(batch, 2, rank) for batch in alone], name


class Module(lightning.LightningModule):  # type: ignore[misc]  # not installed where types are checked
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append(batch)
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*GPU available", "ignore:.*LeafSpec")
def test_lightning_makes_the_steps_of_one_process(name: str) -> None:
    make = partial(LOADERS[name], DataLoader, 0)
    alone, mine = divided(make, 1, 0), divided(make, 2, 1, share="within_batches")
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, mine)
    assert module.seen == [part(batch, 2, 1) for batch in [*alone, *alone]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_torchdatas_own_state_is_exact(name: str, workers: int) -> None:
    make = partial(LOADERS[name], StatefulDataLoader, workers)
    alone = divided(make, 1, 0)
    whole = [[part(batch, 2, 1) for batch in alone] for _ in range(2)]
    for batches in (1, 3):
        stopped = divided(make, 2, 1, share="within_batches")
        assert list(islice(stopped, batches)) == whole[0][:batches]
        resumed = divided(make, 2, 1, share="within_batches")
        resumed.load_state_dict(stopped.state_dict())
        assert [list(resumed), list(resumed)] == [whole[0][batches:], whole[1]]
