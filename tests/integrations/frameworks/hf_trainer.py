"""Hugging Face's ``Trainer``, whose ``get_train_dataloader`` returns the loader."""

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import features, tiny_model
from frameworks.tensors import NotedTensor, as_batch

__all__ = ["FRAMEWORK"]


def as_inputs(numbers: list[int]) -> dict[str, torch.Tensor]:
    """A batch as the Trainer takes it: tensors by name."""
    return {"numbers": NotedTensor.of(numbers)}


class OwnLoader(Trainer):  # type: ignore[misc]  # it is not there where types are checked
    """A Trainer that gets its loader from a method of its user's."""

    def __init__(self, loader: Any, patched: bool, **options: Any) -> None:
        self.given, self.patched = loader, patched
        self.seen: Epochs = []
        super().__init__(**options)

    def get_train_dataloader(self) -> Any:
        if self.patched:
            # The same seed for every Trainer that a script makes, as a script that is started again has it.
            return patch_dataloader_to_ddp(self.given, seed=0)
        # What the Trainer's own method does with the loader that it makes.
        return self.accelerator.prepare(self.given)

    def compute_loss(self, model: Any, inputs: Any, *positional: Any, **options: Any) -> torch.Tensor:
        batch = as_batch(inputs["numbers"])
        self.seen[-1].append(batch)
        loss: torch.Tensor = model(features(batch)).square().mean()
        return loss


class EachEpoch(TrainerCallback):  # type: ignore[misc]  # it is not there where types are checked
    """Begins a new list of what is seen."""

    def __init__(self, trainer: OwnLoader) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, *positional: Any, **options: Any) -> None:
        self.trainer.seen.append([])


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Train for some epochs, whose numbers the Trainer itself tells the loader; for one said, up to that."""
    loader.collate_fn = as_inputs
    seen = train(loader, patched, epochs.count(None))
    return seen + [train(loader, patched, epoch + 1)[epoch] for epoch in epochs if epoch is not None]


def train(loader: Any, patched: bool, epochs: int) -> Epochs:
    """Train from the beginning."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        trainer = OwnLoader(loader, patched, model=tiny_model(), args=arguments)
        trainer.add_callback(EachEpoch(trainer))
        trainer.train()
    assert trainer.state.global_step == sum(map(len, trainer.seen))  # it had planned for as many steps as it made
    return trainer.seen


FRAMEWORK = Framework(("transformers", "accelerate"), passes, moves=True)
