"""Hugging Face's ``datasets``: a map-style dataset in the user's loader, and a streamed one."""

import os
from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import Batch, made_anew, tiny_model
from frameworks.loops import train

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when datasets is imported: nothing here is downloaded

from datasets import Dataset

__all__ = ["FRAMEWORK"]


def as_batch(rows: list[dict[str, int]]) -> Batch:
    """The rows that ``Dataset.__getitems__`` gives."""
    return Batch([row["number"] for row in rows])


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Make a loader of the dataset with the same batches."""
    rows: Any = Dataset.from_dict({"number": range(len(loader.dataset))})
    is_streamed = isinstance(loader.dataset, IterableDataset)
    if is_streamed:
        rows = rows.to_iterable_dataset().shuffle(seed=0, buffer_size=len(rows))
    ready = made_anew(DataLoader, loader, rows, as_batch)
    if patched:
        ready = patch_dataloader_to_ddp(ready)
    elif is_streamed:
        epochs = range(len(epochs))  # as the documentation of datasets has it
    model = DistributedDataParallel(tiny_model())
    told = rows if is_streamed and not patched else ready.sampler
    return train(model, ready, epochs, set_epoch=lambda epoch: told.set_epoch(epoch))


FRAMEWORK = Framework(("datasets",), passes, moves=False)
