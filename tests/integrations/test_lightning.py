"""Lightning's Trainer with loaders that were patched by hand: predicted, resumed, and with ``overfit_batches``."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.kinds import KINDS, Batch
from frameworks.lightning_trainer import Trained, quiet_trainer
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from messages import raises
from repeaters import MultiEpochs
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import StateError, UnsupportedLoaderError

# predict() loses the sampler of an iterable dataset.
MAP_STYLE = [kind for kind in KINDS if not isinstance(kind.make().dataset, IterableDataset)]


class Module(LightningModule):  # type: ignore[misc]  # it is not there where types are checked
    def predict_step(self, batch: Batch) -> list[int]:
        return batch.numbers


def make_trainer() -> Trainer:
    return quiet_trainer(max_epochs=1, num_sanity_val_steps=0)


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
    predicted: Any = make_trainer().predict(Predicting(kind.make))
    numbers = [number for batch in predicted for number in batch]
    assert len(predicted) == len(patch_dataloader_to_ddp(kind.make(), rank=1, num_replicas=2))
    assert len(numbers) == len(set(numbers)) <= -(-kind.n // 2) + 4


@pytest.mark.filterwarnings("ignore")  # as above
def test_of_an_iterable_dataset_predict_says_what_it_lost() -> None:
    with raises(UnsupportedLoaderError, "without its sampler", "patch_dataloader_to_ddp()"):
        make_trainer().predict(Predicting(KINDS[-1].make))


class Recording(Trained):
    """Keeps the samples of each step with the epoch's number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: torch.Tensor) -> Any:
        self.seen.append((self.current_epoch, batch.tolist()))
        return self.loss_of(batch)


class Resuming:
    """A training of three epochs of four steps each, of one of two ranks, with a checkpoint at every step."""

    def __init__(self, folder: Path, make: Callable[[], Any], at_ends: bool = False, **trained_with: Any) -> None:
        self.folder, self.make, self.at_ends = folder, make, at_ends
        self.trained_with = {"max_epochs": 3, **trained_with}

    def fit(self, step: int | None = None) -> list[tuple[int, list[int]]]:
        """Return what the steps after a checkpoint see, or all steps."""
        seed_ambient(7 if step is None else 8)
        patched = self.make()
        module = Recording()
        folder = self.folder if step is None else self.folder / f"from_{step}"
        every = None if self.at_ends else 1
        saving = ModelCheckpoint(
            folder, "{step}", every_n_train_steps=every, save_top_k=-1, save_on_train_epoch_end=self.at_ends
        )
        trainer = quiet_trainer(saving, num_sanity_val_steps=1, **self.trained_with)
        valuation: Any = as_rank_1(DataLoader(range(6), 2))  # type: ignore[arg-type]  # a range is a dataset
        trainer.fit(module, patched, valuation, ckpt_path=None if step is None else self.folder / f"step={step}.ckpt")
        assert valuation.sampler.epoch == 0 or not valuation.state_dict()["taken"]
        return module.seen


def as_rank_1(loader: DataLoader[Any], **options: Any) -> Any:
    return patch_dataloader_to_ddp(loader, seed=3, rank=1, num_replicas=2, **options)


def shuffled(kind: type[DataLoader[Any]] = DataLoader, **options: Any) -> DataLoader[Any]:
    return kind(range(16), 2, shuffle=True, **options)  # type: ignore[arg-type]  # as above


class OwnIteration(DataLoader[Any]):
    """May fetch ahead for all that anybody knows."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


# A loader, which is resumed within its first, second and third epoch, and between two.
RESUMED: dict[str, Callable[[], Any]] = {
    "no workers": lambda: as_rank_1(shuffled()),
    "persistent workers": lambda: as_rank_1(shuffled(num_workers=2, persistent_workers=True)),
    "torchdata, workers": lambda: as_rank_1(shuffled(StatefulDataLoader, num_workers=2)),
    "generator": lambda: as_rank_1(shuffled(generator=torch.Generator().manual_seed(3))),
    "one iterator for all": lambda: as_rank_1(shuffled(MultiEpochs)),
}


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_within_an_epoch(tmp_path: Path, name: str) -> None:
    """Steps are those of a run that was never stopped, in later epochs too, which the Trainer plans by the length."""
    resuming = Resuming(tmp_path, RESUMED[name])
    whole = resuming.fit()
    assert [epoch for epoch, _ in whole] == [0] * 4 + [1] * 4 + [2] * 4
    for step in (7,) if name.startswith("torchdata") else (3, 4, 7):
        assert resuming.fit(step) == whole[step:]


@pytest.mark.filterwarnings("ignore")  # as above
def test_of_a_loader_without_length_a_batch_is_fetched_ahead(tmp_path: Path) -> None:
    """As the page says: the Trainer would lose that batch, so the state says that the place is not known."""

    def unsized() -> Any:
        return as_rank_1(DataLoader(Stream(), 2))

    resuming = Resuming(tmp_path / "torch", unsized)
    whole = resuming.fit()
    with raises(StateError, ("DataLoader has no len()", "ahead"), ("__len__", "PatchDataLoaders()")):
        resuming.fit(3)
    # Between two epochs nothing is ahead; and a Trainer that counts steps asks there, too.
    for trained_with in ({}, {"max_epochs": -1, "max_steps": 12}):
        resuming = Resuming(tmp_path / f"{trained_with}", unsized, at_ends=True, **trained_with)
        assert resuming.fit() == whole
        assert [batch for _, batch in resuming.fit(4)] == [batch for _, batch in whole[4:]]


@pytest.mark.filterwarnings("ignore")  # as above
def test_without_its_place_a_resumed_epoch_begins_anew(tmp_path: Path) -> None:
    """As the page says: between two epochs all is as it was; within one the Trainer counts steps, and warns of it."""
    resuming = Resuming(tmp_path, lambda: as_rank_1(shuffled(OwnIteration)))
    whole = resuming.fit()
    epochs = [epoch for epoch, _ in whole]
    assert [epoch for epoch, _ in resuming.fit(4)] == epochs[4:]
    with pytest.warns(UserWarning, match="not resumable"):
        resumed = resuming.fit(6)
    assert resuming.fit(4) == whole[4:]
    assert resumed == [*whole[4:6], *whole[8:]]


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_generator_given_by_the_user_begins_anew_with_the_process(tmp_path: Path) -> None:
    """Between two epochs the Trainer loads no place, so nobody knows where the generator was when the epoch began."""
    resuming = Resuming(tmp_path, RESUMED["generator"], at_ends=True)
    resuming.fit()
    resumed, again = ([batch for _, batch in resuming.fit(4)] for _ in range(2))
    assert resumed == again
    epochs = [sum(resumed[start : start + 4], []) for start in (0, 4)]  # noqa: RUF017 - four short lists
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


def overfit(loader: DataLoader[Any]) -> list[list[int]]:
    module, trainer = Recording(), make_trainer()
    trainer.overfit_batches = trainer.limit_train_batches = 2
    trainer.fit(module, patch_dataloader_to_ddp(loader, rank=1, num_replicas=2))
    return [batch for _, batch in module.seen]


@pytest.mark.filterwarnings("ignore")  # as above
def test_overfit_batches() -> None:
    """It puts a sequential sampler into any loader, which then is not shared, or cannot be made anew."""
    data: Any = range(8)
    assert overfit(DataLoader(data, 2, shuffle=True)) == [[0, 1], [2, 3]]
    with raises(UnsupportedLoaderError, "Lightning's overfit_batches", "whole batch sampler"):
        overfit(KINDS[2].make())
    with pytest.raises(TypeError, match=r"can't inject a .distributed. sampler into your batch sampler"):
        overfit(KINDS[3].make())
    with raises(UnsupportedLoaderError, "Lightning's predict and overfit_batches", "patch_dataloader_to_ddp()"):
        overfit(DataLoader(Stream(), 2))
