"""Lightning: ``Trainer.fit``."""

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import Batch, tiny_model

__all__ = ["FRAMEWORK", "Trained", "every_step", "quiet_trainer"]


class Trained(LightningModule):  # type: ignore[misc]  # it is not there where types are checked
    """Trains a tiny model on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()

    def loss_of(self, numbers: Any) -> Any:
        return self.model(torch.as_tensor(numbers, dtype=torch.float32)[:, None]).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.000001)


class Module(Trained):
    """A module that makes its loader in ``train_dataloader``, where the process group exists."""

    def __init__(self, loader: Any, patched: bool, epochs: Sequence[int | None]) -> None:
        super().__init__()
        self.loader, self.patched, self.epochs = loader, patched, epochs
        self.seen: Epochs = []

    def train_dataloader(self) -> Any:
        return patch_dataloader_to_ddp(self.loader) if self.patched else self.loader

    def on_train_epoch_start(self) -> None:
        # The Trainer has called set_epoch itself; a call here comes after it.
        if (epoch := self.epochs[self.current_epoch]) is not None:
            self.trainer.train_dataloader.sampler.set_epoch(epoch)
        self.seen.append([])

    def training_step(self, batch: Batch) -> Any:
        self.seen[-1].append(batch)
        return self.loss_of(batch.numbers)


def quiet_trainer(*callbacks: Any, **options: Any) -> Trainer:
    """Return a Trainer that prints nothing, and saves where a callback does."""
    return Trainer(
        accelerator="cpu",
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def every_step(folder: Any) -> ModelCheckpoint:
    """Return a callback that keeps a checkpoint after each step."""
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False)


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Fit for some epochs."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # the ranks were started by something else than the Trainer
    module = Module(loader, patched, epochs)
    quiet_trainer(devices=dist.get_world_size(), strategy="ddp", max_epochs=len(epochs)).fit(module)
    return module.seen


FRAMEWORK = Framework(("lightning",), passes, moves=True)
