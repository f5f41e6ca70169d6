"""The tensors in what a module is given, or returns."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["leaves_of", "mapped", "tensors_in"]

_NO_HOLDERS = (type, FunctionType, MethodType, ModuleType, nn.Module, torch.device, torch.dtype, torch.Generator)


def _parts(value: Any, objects: bool) -> dict[Any, Any] | None:
    """Return what a value holds, by key, index or name; None if it is no container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    is_holder = is_dataclass(value) or (objects and hasattr(value, "__dict__"))
    return dict(vars(value)) if is_holder and not isinstance(value, _NO_HOLDERS) else None


def mapped(value: Any, change: Callable[[torch.Tensor], Any], *, objects: bool = False) -> Any:
    """Return a value with other tensors in it; what holds none is the same object.

    Args:
        value: A tensor, or a list, tuple, dict or dataclass of some, nested in any way.
        change: Is given each tensor, in their order.
        objects: Whether attributes of other objects count, too.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if (parts := _parts(value, objects)) is None:
        return value
    changed = {key: mapped(part, change, objects=objects) for key, part in parts.items()}
    if all(changed[key] is part for key, part in parts.items()):
        return value
    if isinstance(value, list | tuple):
        return type(value)(*changed.values()) if hasattr(value, "_fields") else type(value)(changed.values())
    if type(value) is dict:
        return changed
    copied: Any = copy.copy(value)
    for key, part in changed.items():
        if part is parts[key]:
            continue
        if isinstance(value, Mapping):
            copied[key] = part
        else:
            object.__setattr__(copied, key, part)
    return copied


def leaves_of(value: Any) -> list[Any]:
    """Return what a value is made of: tensors, and all that holds nothing."""
    parts = None if isinstance(value, torch.Tensor) else _parts(value, True)
    return [value] if parts is None else [leaf for part in parts.values() for leaf in leaves_of(part)]


def tensors_in(value: Any, *, objects: bool = False) -> list[torch.Tensor]:
    """Return the tensors in a value, in the order of ``mapped``."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note, objects=objects)
    return found
