"""DeepSpeed: an engine of ``deepspeed.initialize``, whose users bring the loader."""

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import features, tiny_model

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Train by an engine that shards the optimizer."""
    if patched:
        loader = patch_dataloader_to_ddp(loader)
    model = tiny_model()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    config |= {"zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    seen: Epochs = []
    for epoch in epochs:
        if epoch is not None:
            loader.sampler.set_epoch(epoch)
        seen.append([])
        for batch in loader:
            seen[-1].append(batch)
            engine.backward(engine(features(batch)).square().mean())
            engine.step()
    return seen


FRAMEWORK = Framework(("deepspeed",), passes, moves=False)
