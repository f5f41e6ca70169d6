"""Composer: its Trainer, which takes a loader on several ranks only if its sampler is a ``DistributedSampler``."""

from collections.abc import Sequence
from typing import Any

import torch
from composer import ComposerModel, DataSpec, Trainer
from composer.utils import dist

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import features, tiny_model

__all__ = ["FRAMEWORK"]


class Seeing(ComposerModel):  # type: ignore[misc]  # checked without Composer
    """Notes the batches that it is trained on, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()
        self.seen: Epochs = []

    def forward(self, batch: Any) -> Any:
        """Note a batch, and compute its outputs."""
        self.seen[-1].append(batch)
        return self.model(features(batch))

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return what is made smaller."""
        return outputs.square().mean()


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Train by a Trainer."""
    dist.initialize_dist("cpu")
    if patched:
        loader = patch_dataloader_to_ddp(loader)
    model = Seeing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
    # It asks a DataLoader for its batch_size, and cuts batches that it knows, to accumulate gradients.
    data = DataSpec(
        loader, get_num_samples_in_batch=lambda batch: len(batch.numbers), split_batch=lambda batch, _size: [batch]
    )
    options = {"device": "cpu", "progress_bar": False, "device_train_microbatch_size": 4}
    trainer = Trainer(model=model, train_dataloader=data, optimizers=optimizer, **options)
    for _ in epochs:
        model.seen.append([])
        trainer.fit(duration="1ep")
    return model.seen


FRAMEWORK = Framework(("mosaicml",), passes, moves=True)
