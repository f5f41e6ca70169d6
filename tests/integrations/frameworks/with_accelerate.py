"""accelerate: ``Accelerator.prepare``."""

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.integrations.accelerate import prepare_patched
from frameworks.base import Epochs, Framework
from frameworks.kinds import tiny_model
from frameworks.loops import train
from frameworks.tensors import NotedTensor, Seen

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Prepare model and loader."""
    accelerator = Accelerator(cpu=True)
    loader.collate_fn = NotedTensor.of  # of an iterable dataset rank 0 sends tensors to the others
    if patched:
        loader = prepare_patched(accelerator, patch_dataloader_to_ddp(loader))
    model, loader = accelerator.prepare(tiny_model(), loader)
    return train(model, Seen(loader), epochs, set_epoch=loader.set_epoch, backward=accelerator.backward)


FRAMEWORK = Framework(("accelerate",), passes, moves=True)
