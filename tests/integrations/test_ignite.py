"""ignite's engines over a patched loader: resumed within an epoch, and made deterministic."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp, restore_loader

with warnings.catch_warnings():
    # Importing ignite imports parts of torch that use torch.jit, which torch 2.13 deprecates.
    warnings.filterwarnings("ignore", r"`torch.jit.\w+` is deprecated", DeprecationWarning)
    from ignite.engine import DeterministicEngine, Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

DATA: Any = range(16)


class Pairs(BatchSampler):
    """A batch sampler that is shared whole."""


class Training:
    """One of two ranks, with four steps in an epoch."""

    def __init__(self, engine: type[Any] = Engine, seed: int = 7, **options: Any) -> None:
        seed_ambient(seed)
        loader = DataLoader(DATA, 2, shuffle=True, **options)
        self.loader: Any = patch_dataloader_to_ddp(loader, seed=3, rank=1, num_replicas=2)
        self.seen: list[tuple[int, list[int]]] = []
        self.trainer = engine(lambda trainer, batch: self.seen.append((trainer.state.epoch, batch.tolist())))
        # What the page saves: the engine's state has the length of a whole epoch.
        self.saved = {"trainer": self.trainer, "loader": self.loader}

    def run(self, folder: Path) -> None:
        """Run, and save after each step."""
        saving = Checkpoint(self.saved, DiskSaver(folder, create_dir=True), n_saved=None)
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, saving)
        self.trainer.run(self.loader, max_epochs=3)

    def load(self, folder: Path, step: int) -> None:
        """Load what was saved after a step."""
        Checkpoint.load_objects(self.saved, folder / f"checkpoint_{step}.pt")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resumed_within_an_epoch(tmp_path: Path, num_workers: int) -> None:
    """Steps, and the epochs in which they are, are those of a run that was never stopped."""
    stopped = Training(num_workers=num_workers)
    stopped.run(tmp_path)
    assert len(stopped.seen) == 12
    for step in (2, 5, 7, 8) if not num_workers else (2, 7):
        resumed = Training(seed=8, num_workers=num_workers)
        resumed.load(tmp_path, step)
        resumed.trainer.run(resumed.loader)
        assert resumed.seen == stopped.seen[step:]


def test_planned_by_the_length_of_the_rest_all_epochs_are_cut_short(tmp_path: Path) -> None:
    """Which is why the page does not restore by ``restore_loader``."""
    stopped, resumed = Training(), Training()
    stopped.run(tmp_path)
    restore_loader(resumed.loader, torch.load(tmp_path / "checkpoint_5.pt")["loader"])
    resumed.trainer.run(resumed.loader, max_epochs=3)
    assert len(resumed.seen) == 9


def test_a_deterministic_engine_needs_the_loader_without_its_own_methods() -> None:
    """It makes the loader anew from the arguments that it takes the attributes for."""
    refused, training, told = Training(DeterministicEngine), Training(DeterministicEngine), Training()
    with pytest.raises(TypeError, match=r"unexpected keyword argument '(set_epoch|load_state_dict|state_dict)'"):
        refused.trainer.run(refused.loader, max_epochs=2)
    del training.loader.set_epoch, training.loader.state_dict, training.loader.load_state_dict
    training.trainer.run(training.loader, max_epochs=2)
    told.trainer.run(told.loader, max_epochs=2)
    assert training.seen == told.seen
    batches = Pairs(SequentialSampler(DATA), 2, drop_last=False)
    whole: Any = patch_dataloader_to_ddp(DataLoader(DATA, batch_sampler=batches), rank=1, num_replicas=2)
    del whole.set_epoch, whole.state_dict, whole.load_state_dict
    with pytest.raises(TypeError, match="batch_sampler should be torch"):
        Training(DeterministicEngine).trainer.run(whole)
