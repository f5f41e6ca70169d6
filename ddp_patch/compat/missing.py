"""Raise an error if this torch lacks a private name: it says which, and what needs it."""

from pkgutil import resolve_name
from typing import Any

import torch

from ddp_patch.errors import TorchVersionError

__all__ = ["lacking", "private"]


def private(name: str, needed_for: str, instead: str = "") -> Any:
    """Return a private name of torch, looked up when it is needed.

    Args:
        name: The full name, such as ``torch.utils.data.dataloader._BaseDataLoaderIter``.
        needed_for: What needs it, for the error.
        instead: Another remedy than another torch: a sentence.

    Raises:
        TorchVersionError: This torch does not have it.
    """
    try:
        return resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise lacking(name, needed_for, instead) from error


def lacking(name: str, needed_for: str, instead: str = "") -> TorchVersionError:
    """Return the error that torch lacks something.

    Args:
        name: What it lacks.
        needed_for: What needs it.
        instead: Another remedy than another torch: a sentence.
    """
    return TorchVersionError(
        f"{needed_for} needs {name}, and torch {torch.__version__} does not have it: it is a private name, which any "
        f"version may change. Use a version that docs/compatibility.md lists. {instead}".rstrip()
    )
