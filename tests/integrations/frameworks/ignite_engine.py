"""ignite: an ``Engine`` that runs over the loader."""

from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
import torch
from frameworks.base import Epochs, Framework
from frameworks.kinds import Batch, features, tiny_model
from ignite.engine import Engine, Events

from ddp_patch import patch_dataloader_to_ddp

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Adapt the model by ``idist.auto_model`` and run an engine over the loader."""
    if patched:
        loader = patch_dataloader_to_ddp(loader)
    model = idist.auto_model(tiny_model())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.001))
    seen: Epochs = []

    def step(engine: Engine, batch: Batch) -> None:
        seen[-1].append(batch)
        optimizer.zero_grad()
        model(features(batch)).square().mean().backward()
        optimizer.step()

    trainer = Engine(step)

    @trainer.on(Events.EPOCH_STARTED)
    def begin(engine: Engine) -> None:
        seen.append([])
        if (epoch := epochs[engine.state.epoch - 1]) is not None:
            loader.sampler.set_epoch(epoch)

    trainer.run(loader, max_epochs=len(epochs))
    return seen


FRAMEWORK = Framework(("pytorch-ignite",), passes, moves=False)
