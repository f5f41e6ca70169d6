"""Hugging Face: train on the ranks that torchrun starts; with a checkpoint's folder as argument, resume from it."""

import sys

import torch
from transformers import Trainer, TrainingArguments

from ddp_patch.integrations.transformers import PatchedLoadersMixin


class MyTrainer(PatchedLoadersMixin, Trainer):
    """Any Trainer."""


class Model(torch.nn.Module):
    """Any model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Predict a label."""
        predicted = self.layer(x)
        return {"loss": (predicted - labels[:, None]).square().mean(), "logits": predicted}


rows = [{"x": torch.ones(3), "labels": float(number)} for number in range(64)]
arguments = TrainingArguments(
    "checkpoints", per_device_train_batch_size=4, num_train_epochs=2, save_steps=5, use_cpu=True
)
trainer = MyTrainer(model=Model(), args=arguments, train_dataset=rows)
trainer.train(resume_from_checkpoint=sys.argv[1] if len(sys.argv) > 1 else None)
