"""ignite: an ``Engine``, over what ``idist.auto_dataloader`` makes, or over a patched loader."""

from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from ddp_patch import extract_loader_parameters, patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import Batch, features, tiny_model

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Adapt loader and model to the ranks, and run an engine."""
    loader = patch_dataloader_to_ddp(loader) if patched else auto(loader)
    model = idist.auto_model(tiny_model())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.001))
    seen: Epochs = []

    def step(engine: Engine, batch: Batch) -> None:
        seen[-1].append(batch)
        optimizer.zero_grad()
        model(features(batch)).square().mean().backward()
        optimizer.step()

    trainer = Engine(step)

    def begin(engine: Engine) -> None:
        seen.append([])
        number = engine.state.epoch - 1
        if (epoch := epochs[number]) is not None:
            loader.sampler.set_epoch(epoch)
        elif not patched and hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(number)  # which a patched loader does without

    trainer.add_event_handler(Events.EPOCH_STARTED, begin)
    trainer.run(loader, max_epochs=len(epochs))
    return seen


def auto(loader: Any) -> Any:
    """Return what ``auto_dataloader`` makes of the arguments that a loader was made from."""
    options = extract_loader_parameters(loader, ignore_data_related_parameters=True)
    if type(loader.batch_sampler) is not BatchSampler:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options["batch_size"] = loader.batch_size * idist.get_world_size()  # it is shared out among the ranks
        if type(loader.sampler) is RandomSampler:
            options["shuffle"] = True
        elif not isinstance(loader.dataset, IterableDataset):
            options["sampler"] = loader.sampler
    return idist.auto_dataloader(loader.dataset, **options)


FRAMEWORK = Framework(("pytorch-ignite",), passes, moves=False)
