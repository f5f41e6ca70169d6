"""Lightning's Trainer beside ``fit``: it validates, tests and predicts every batch of a patched loader once."""

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from frameworks.kinds import KINDS, Batch, features, tiny_model
from lightning.pytorch import LightningModule, Trainer
from quick import run_ranks
from torch.utils.data import DataLoader, IterableDataset
from zoo import seed_ambient

from ddp_patch import UnsupportedLoaderError, patch_dataloader_to_ddp

# Of an iterable dataset predict() loses the sampler.
MAP_STYLE = [kind for kind in KINDS if not isinstance(kind.make().dataset, IterableDataset)]


class Module(LightningModule):  # type: ignore[misc]  # it is not there where types are checked
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()
        self.seen: list[list[int]] = []

    def training_step(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.model(features(batch)).square().mean()
        return loss

    def validation_step(self, batch: Batch) -> None:
        self.seen.append(batch.numbers)

    test_step = validation_step

    def predict_step(self, batch: Batch) -> list[int]:
        return batch.numbers

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def make_trainer(world_size: int) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def on_rank(rank: int, world_size: int) -> dict[str, list[list[list[int]]]]:
    logging.disable()
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # the ranks were started by something else than the Trainer
    found: dict[str, list[list[list[int]]]] = {}
    for kind in KINDS:
        seed_ambient(100 + rank)
        trainer = make_trainer(world_size)
        fitted, validated, tested = Module(), Module(), Module()
        trainer.fit(fitted, patch_dataloader_to_ddp(kind.make()), patch_dataloader_to_ddp(kind.make()))
        trainer.validate(validated, patch_dataloader_to_ddp(kind.make()), verbose=False)
        trainer.test(tested, patch_dataloader_to_ddp(kind.make()), verbose=False)
        found[kind.name] = [fitted.seen, validated.seen, tested.seen]
        if kind in MAP_STYLE:
            predicted: Any = trainer.predict(Module(), patch_dataloader_to_ddp(kind.make()))
            found[kind.name].append(predicted)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[list[list[int]]]]]:
    return run_ranks(on_rank, 2)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_batch_once(ranks: list[dict[str, list[list[list[int]]]]], kind: Any) -> None:
    passes = list(zip(*(rank[kind.name] for rank in ranks), strict=True))
    assert len(passes) == 3 + (kind in MAP_STYLE)
    for first, second in passes:
        assert len(first) == len(second)
        batches = [*first, *second]
        taken = {number for batch in batches for number in batch}
        assert taken == set(range(kind.n))
        if kind.is_whole is not None:
            assert all(map(kind.is_whole, batches))
            assert len(batches) - len({tuple(sorted(batch)) for batch in batches}) < 2
        else:
            assert sum(map(len, batches)) - kind.n < 2


class Predicting(Module):
    """Makes its loader in a hook, of which Lightning notes how it is made."""

    def __init__(self, make: Callable[[], DataLoader[Any]]) -> None:
        super().__init__()
        self.make = make

    def predict_dataloader(self) -> DataLoader[Any]:
        return patch_dataloader_to_ddp(self.make(), rank=1, num_replicas=2)


# Lightning warns of small data, of CPUs and of its own deprecations.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MAP_STYLE, ids=lambda kind: kind.name)
def test_what_a_hook_patches_is_predicted_once(kind: Any) -> None:
    """Lightning makes the loader anew, and the arguments that it noted are those of the unpatched one."""
    seed_ambient(3)
    predicted: Any = make_trainer(1).predict(Predicting(kind.make))
    numbers = [number for batch in predicted for number in batch]
    assert len(predicted) == len(patch_dataloader_to_ddp(kind.make(), rank=1, num_replicas=2))
    assert len(numbers) == len(set(numbers)) <= -(-kind.n // 2) + 4


@pytest.mark.filterwarnings("ignore")  # as above
def test_of_an_iterable_dataset_predict_says_what_it_lost() -> None:
    with pytest.raises(UnsupportedLoaderError, match="made anew without its sampler"):
        make_trainer(1).predict(Predicting(KINDS[-1].make))
