"""One loader of each kind in one framework after the other: what its training step sees, patched and not.

``kinds.py`` has the loaders, ``judge.py`` says what came of them, and ``page.py`` keeps the table of the docs. Each
other module is one framework and has a ``FRAMEWORK``.
"""

from importlib import import_module

from frameworks.base import Framework

__all__ = ["FRAMEWORKS", "framework"]

# Modules and what the table calls them, in its order. Each is imported by its own test, so that one can do without the
# others' packages.
FRAMEWORKS = {
    "torch_ddp": "`DistributedDataParallel`",
    "torch_fsdp": "FSDP2",
    "with_accelerate": "accelerate",
    "lightning_fabric": "Lightning Fabric",
    "lightning_trainer": "Lightning `Trainer`",
    "with_ignite": "ignite",
    "hf_trainer": "Hugging Face `Trainer`",
    "hf_datasets": "Hugging Face `datasets`",
    "torchdata_stateful": "torchdata `StatefulDataLoader`, resumed in each epoch",
    "pyg": "PyTorch Geometric `DataLoader`",
    "ray_train": "Ray `TorchTrainer`",
    "ray_prepared": "Ray `prepare_data_loader`",
}


def framework(module: str) -> Framework:
    """Return the framework that a module of this package describes."""
    found: Framework = import_module(f"frameworks.{module}").FRAMEWORK
    return found
