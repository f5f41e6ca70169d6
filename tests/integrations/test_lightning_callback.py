"""One callback has Lightning's Trainer share every loader that it is given, and resume them all within an epoch."""

import logging
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.kinds import KINDS, Batch, Stream, tiny_model
from frameworks.lightning_trainer import Trained, every_step, quiet_trainer
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from messages import raises
from quick import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, WeightedRandomSampler
from zoo import seed_ambient

from ddp_patch import autopatch, check_loaders_is_patched, gather_step
from ddp_patch.errors import InvalidOptionError, NotDistributedWarning, StateError
from ddp_patch.integrations.lightning import PatchDataLoaders

RANKS = 2
NUMBERS: Any = range(30)
Seen = list[list[int]]


class Module(Trained):
    """Notes the numbers of each step, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Seen] = {}

    def note(self, batch: Batch, stage: str) -> None:
        self.seen.setdefault(stage, []).append(batch.numbers)

    def training_step(self, batch: Batch) -> Any:
        self.note(batch, f"epoch {self.current_epoch}")
        return self.loss_of(batch.numbers)

    def validation_step(self, batch: Batch) -> None:
        self.note(batch, "sanity" if self.trainer.sanity_checking else f"val {self.current_epoch}")

    def test_step(self, batch: Batch) -> None:
        self.note(batch, "test")

    def predict_step(self, batch: Batch) -> None:
        self.note(batch, "predict")


class TensorParallel(Module):
    """Has the mesh that ModelParallelStrategy makes: all ranks work on the same batches."""

    @property
    def device_mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("data_parallel", "tensor_parallel"))


class Data(LightningDataModule):  # type: ignore[misc]  # as above
    """Makes its loaders where Lightning notes how they are made."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.train_dataloader = self.val_dataloader = self.test_dataloader = self.predict_dataloader = make


def make_trainer(*callbacks: Any, patching: Any = None, **options: Any) -> Trainer:
    patches = [] if patching is False else [PatchDataLoaders(**patching or {})]
    return quiet_trainer(*patches, *callbacks, **{"max_epochs": 2, **options})


def on_ranks(rank: int, world_size: int, seed: int = 100) -> dict[str, Any]:
    """Begin as a rank of a Trainer's, and return the arguments for it."""
    logging.disable()
    warnings.simplefilter("ignore")  # Lightning warns of small data, of CPUs and of its own deprecations
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # the ranks were started by something else than the Trainer
    seed_ambient(seed + rank)
    return {"devices": world_size, "strategy": "ddp"}


def same_batches(rank: int, world_size: int) -> dict[str, Seen]:
    """What the ranks of one tensor-parallel group see."""
    options = on_ranks(rank, world_size)
    module = TensorParallel()
    make_trainer(**options).fit(module, KINDS[0].make())
    return module.seen


def test_ranks_that_share_a_model_take_the_same_batches() -> None:
    first, second = run_ranks(same_batches, RANKS)
    assert first == second
    assert sorted(chain.from_iterable(first["epoch 1"])) == list(range(27))


def all_stages(rank: int, world_size: int) -> dict[tuple[str, str], Seen]:
    """What the steps of each stage see of each kind of loader, given to the Trainer and made by a data module."""
    options = on_ranks(rank, world_size)
    found: dict[tuple[str, str], Seen] = {}
    for kind in KINDS:
        given, hooked = Module(), Module()
        trainer = make_trainer(reload_dataloaders_every_n_epochs=1, **options)
        trainer.fit(given, kind.make(), kind.make())
        assert check_loaders_is_patched([trainer.train_dataloader, trainer.val_dataloaders])
        trainer = make_trainer(**options)
        with autopatch() as summary:  # which has nothing left to do
            trainer.fit(hooked, datamodule=Data(kind.make))
            trainer.validate(hooked, datamodule=Data(kind.make), verbose=False)
            trainer.test(hooked, datamodule=Data(kind.make), verbose=False)
            trainer.predict(hooked, datamodule=Data(kind.make), return_predictions=False)
        assert {record.fate for record in summary.records} <= {"shards itself"}, summary.records
        found |= {(f"{kind.name}, given", stage): seen for stage, seen in given.seen.items()}
        found |= {(f"{kind.name}, hooked", stage): seen for stage, seen in hooked.seen.items()}
    return found


def test_every_stage_takes_each_sample_once() -> None:
    ranks = run_ranks(all_stages, RANKS)
    sizes = {kind.name: kind for kind in KINDS}
    stages = {stage for _, stage in ranks[0]}
    assert stages == {"epoch 0", "epoch 1", "sanity", "val 0", "val 1", "val 2", "test", "predict"}
    for case, stage in ranks[0]:
        kind = sizes[case.rpartition(",")[0]]
        shares = [rank[case, stage] for rank in ranks]
        if stage != "predict" or case.startswith("`IterableDataset`"):
            assert len({len(share) for share in shares}) == 1
        batches = list(chain.from_iterable(shares))
        if stage == "sanity":
            continue
        assert set(chain.from_iterable(batches)) == set(range(kind.n)), (case, stage)
        if stage == "predict" and not case.startswith("`IterableDataset`"):
            assert sum(map(len, batches)) == kind.n, case
        if kind.is_whole is None:
            assert sum(map(len, batches)) - kind.n < RANKS, (case, stage)
        else:
            assert all(map(kind.is_whole, batches))
            assert len(batches) - len({tuple(sorted(batch)) for batch in batches}) < RANKS


def options_of_training(rank: int, world_size: int) -> Any:
    """What is validated and predicted beside a training with costs, and what two runs take of a CombinedLoader."""
    world = on_ranks(rank, world_size)
    evaluated = Module()
    patching: dict[str, Any] = {"cost": [float(1 + number % 7) for number in range(27)], "uneven": "drop", "seed": 3}
    trainer = make_trainer(patching=patching, max_epochs=1, **world)
    trainer.fit(evaluated, KINDS[0].make(), DataLoader(NUMBERS[:11], 2, collate_fn=Batch))
    trainer.predict(evaluated, DataLoader(NUMBERS[:1], collate_fn=Batch))
    combined = CombinedLoader({"train": [DataLoader(NUMBERS, 3, shuffle=True)]})
    orders = []
    for _ in range(2):
        module = Recording()
        make_trainer(max_epochs=1, **world).fit(module, combined)
        orders.append([batch["train"][0] for _, batch in module.noted])
    return evaluated.seen, orders


def test_evaluation_takes_no_options_of_training() -> None:
    ranks = run_ranks(options_of_training, RANKS)
    validated = list(chain.from_iterable(chain.from_iterable(seen["val 0"] for seen, _ in ranks)))
    assert sorted(set(validated)) == list(range(11))
    assert [seen["predict"] for seen, _ in ranks] == [[[0]]] * RANKS  # fewer samples than ranks are padded
    first, again = (list(chain.from_iterable(orders[run] for _, orders in ranks)) for run in (0, 1))
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(again)) == list(NUMBERS)


def by_the_other_import(rank: int, world_size: int) -> tuple[Seen, Seen]:
    """What a rank trains and predicts with a Trainer of the package pytorch_lightning, which has classes of its own."""
    world, other = on_ranks(rank, world_size), import_module("pytorch_lightning")
    trained: Seen = []
    predicted: Seen = []

    class Elsewhere(other.LightningModule):  # type: ignore[misc, name-defined]  # its module is found at run time
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model()

        def training_step(self, numbers: torch.Tensor) -> Any:
            trained.append(numbers.tolist())
            return self.model(numbers[:, None].float()).square().sum()

        def predict_step(self, numbers: torch.Tensor) -> None:
            predicted.append(numbers.tolist())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.000001)

    module = Elsewhere()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "max_epochs": 1, "enable_checkpointing": False, **quiet, **world}
    trainer = other.Trainer(callbacks=[PatchDataLoaders()], **options)
    trainer.fit(module, DataLoader(NUMBERS[:22], 2, shuffle=True))
    trainer.predict(module, DataLoader(NUMBERS[:5], 2))
    return trained, predicted


def test_the_other_package_of_lightning_takes_the_callback_too() -> None:
    ranks = run_ranks(by_the_other_import, RANKS)
    trained, predicted = ([*chain.from_iterable(rank[stage] for rank in ranks)] for stage in (0, 1))
    assert sorted(chain.from_iterable(trained)) == list(range(22))
    assert sorted(chain.from_iterable(predicted)) == list(range(5))  # without padding


class TwoValidations(Module):
    """Gathers the outputs of two validation loaders, each by itself."""

    def validation_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        loader = self.trainer.val_dataloaders[dataloader_idx]
        stage = "sanity" if self.trainer.sanity_checking else f"val {self.current_epoch}, loader {dataloader_idx}"
        self.seen.setdefault(stage, []).append(gather_step(batch, loader).tolist())


def validated_by_two_loaders(rank: int, world_size: int) -> dict[str, Seen]:
    options = on_ranks(rank, world_size)
    module = TwoValidations()
    loaders = [DataLoader(torch.arange(length), 2) for length in (7, 5)]  # type: ignore[arg-type, var-annotated]
    make_trainer(**options).fit(module, KINDS[0].make(), loaders)
    return module.seen


def test_of_two_validation_loaders_each_sample_counts_once() -> None:
    for seen in run_ranks(validated_by_two_loaders, RANKS):
        for epoch in range(2):
            for number, length in enumerate((7, 5)):
                assert [*chain.from_iterable(seen[f"val {epoch}, loader {number}"])] == list(range(length))


class Recording(Module):
    """Notes what a nest of batches holds."""

    def training_step(self, batch: Any) -> Any:
        numbers = {name: [one.tolist() for one in values] for name, values in batch.items()}
        self.noted.append((self.current_epoch, numbers))
        return self.loss_of([1])

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, Any]] = []


def nest(workers: int) -> Any:
    weighted = WeightedRandomSampler([float(number + 1) for number in NUMBERS], len(NUMBERS), replacement=False)
    longer: Any = range(40)
    made = {
        "weighted": [DataLoader(NUMBERS, 3, sampler=weighted, num_workers=workers, persistent_workers=workers > 0)],
        "others": [DataLoader(longer if workers else NUMBERS, 3, shuffle=True), DataLoader(Stream(20), 2)],
    }
    return CombinedLoader(made, "min_size") if workers else made


def stopped_and_resumed(rank: int, world_size: int, folder: str) -> list[tuple[list[Any], list[Any]]]:
    """What one rank's steps see of two epochs, never stopped and after checkpoints."""
    found = []
    for workers in (0, 1):
        kept = Path(folder, str(workers))
        options = on_ranks(rank, world_size)
        whole = Recording()
        make_trainer(every_step(kept), **options).fit(whole, nest(workers))
        for step in (2, 5, 8):
            on_ranks(rank, world_size, seed=200)
            rest = Recording()
            make_trainer(**options).fit(rest, nest(workers), ckpt_path=kept / f"step={step}.ckpt")
            found.append((whole.noted[step:], rest.noted))
    return found


def test_a_nest_of_loaders_resumes_within_an_epoch(tmp_path: Path) -> None:
    for rank in run_ranks(stopped_and_resumed, RANKS, str(tmp_path)):
        assert [len(whole) for whole, _ in rank] == [8, 5, 2] * 2
        for whole, rest in rank:
            assert rest == whole


def begun(rank: int, world_size: int, folder: str, step: int | None) -> list[list[int]]:
    """What one rank trains of an epoch: all, with a checkpoint after each step; or what is left."""
    file = None if step is None else Path(folder, f"step={step}.ckpt")
    module, options = Module(), {"max_epochs": 1, **on_ranks(rank, world_size, seed=10 * world_size)}
    make_trainer(*[every_step(folder)] * (step is None), **options).fit(module, KINDS[0].make(), ckpt_path=file)
    return module.seen["epoch 0"]


def test_ranks_of_another_number_train_the_rest(tmp_path: Path) -> None:
    before = [batch for seen in run_ranks(begun, RANKS, str(tmp_path), None) for batch in seen[:2]]
    rest = chain.from_iterable(run_ranks(begun, 3, str(tmp_path), 2))
    numbers = list(chain.from_iterable([*before, *rest]))
    assert (set(numbers), len(numbers)) == (set(range(27)), 28)  # of 11, and padding


@pytest.mark.filterwarnings("ignore")  # Lightning warns of small data, of CPUs and of its own deprecations
def test_a_checkpoint_without_positions_is_refused_within_an_epoch(tmp_path: Path) -> None:
    ending = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    make_trainer(every_step(tmp_path), ending, patching=False).fit(Module(), KINDS[0].make())
    for world in ({"rank": 1, "num_replicas": 2}, {}):
        with raises(StateError, ("2 batches", "PatchDataLoaders"), "at the end of an epoch"):
            make_trainer(patching=world).fit(Module(), KINDS[0].make(), ckpt_path=tmp_path / "step=2.ckpt")
    module = Module()
    make_trainer().fit(module, KINDS[0].make(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert set(module.seen) == {"epoch 1"}
    assert sorted(chain.from_iterable(module.seen["epoch 1"])) == list(range(27))


# Lightning warns of small data, of CPUs and of its own deprecations.
@pytest.mark.filterwarnings("ignore")
def test_one_process_patches_its_training_loaders_alone() -> None:
    loader, valuation, module = KINDS[0].make(), KINDS[0].make(), Module()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotDistributedWarning)
        trainer = make_trainer()
        trainer.fit(module, loader, valuation)
    assert (trainer.train_dataloader.sampler.num_replicas, trainer.val_dataloaders) == (1, valuation)
    assert sorted(chain.from_iterable(module.seen["epoch 1"])) == list(range(27))


@pytest.mark.filterwarnings("ignore")  # as above
def test_overfit_batches_takes_a_rank_s_first_batches() -> None:
    """Of a loader that was patched before, every rank takes the same ones."""
    module = Module()
    make_trainer(patching={"rank": 1, "num_replicas": 2}, overfit_batches=2).fit(module, KINDS[0].make())
    assert module.seen["epoch 0"] == module.seen["epoch 1"] == [[1, 3, 5, 7], [9, 11, 13, 15]]


class Failing(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        raise LookupError


@pytest.mark.filterwarnings("ignore")  # as above
def test_an_exception_leaves_the_trainer_as_it_was() -> None:
    trainer = make_trainer(patching={"rank": 1, "num_replicas": 2})
    with pytest.raises(LookupError):
        trainer.fit(Failing(), KINDS[0].make())
    trainer.callbacks = []
    module = Module()
    trainer.fit(module, KINDS[0].make())
    assert sorted(chain.from_iterable(module.seen["epoch 0"])) == list(range(27))


@pytest.mark.filterwarnings("ignore")  # as above
def test_one_callback_is_enough() -> None:
    with raises(InvalidOptionError, "several PatchDataLoaders", "single"):
        make_trainer(PatchDataLoaders()).fit(Module(), KINDS[0].make())
