"""One loader of each kind in one framework after the other: what its training step sees, patched and not.

``kinds.py`` has the loaders, and each other module but ``base.py`` is one framework and has a ``FRAMEWORK``. What they
make of loaders that are not patched is measured by ``benchmarks/unpatched.py``.
"""

from importlib import import_module

from frameworks.base import Framework

__all__ = ["FRAMEWORKS", "framework"]

# Each module is imported by its own test, so that one can do without the others' packages.
FRAMEWORKS = (
    "torch_ddp",
    "torch_fsdp",
    "with_accelerate",
    "lightning_fabric",
    "lightning_trainer",
    "with_ignite",
    "hf_trainer",
    "torchdata_stateful",
    "ray_prepared",
)


def framework(module: str) -> Framework:
    """Return the framework that a module of this package describes."""
    found: Framework = import_module(f"frameworks.{module}").FRAMEWORK
    return found
