"""The tensors in nested arguments and outputs; the state of modules; and the difference of two tensors."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ddp_patch.compat.private_torch import tables_of
from ddp_patch.orders.random_states import GlobalState, generator_states, set_generator_states
from ddp_patch.running.random_numbers import put_torch_states, torch_states

PLAIN = {bool, int, float, str, type(None)}
_NO_HOLDERS = (type, FunctionType, MethodType, ModuleType, nn.Module, torch.device, torch.dtype, torch.Generator)


def _parts(value: Any, objects: bool) -> dict[Any, Any] | None:
    """Return the parts of a container by key, index or attribute; None if a value is no container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    is_holder = is_dataclass(value) or (objects and hasattr(value, "__dict__"))
    return dict(vars(value)) if is_holder and not isinstance(value, _NO_HOLDERS) else None


def mapped(value: Any, change: Callable[[torch.Tensor], Any], *, objects: bool = False) -> Any:
    """Return a value with other tensors in it. Containers without tensors stay the same objects.

    Args:
        value: A tensor, or a list, tuple, dict or dataclass of some, nested in any way.
        change: Returns the other tensor for each tensor, in their order.
        objects: Whether to look into the attributes of any object.
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
        if part is not parts[key]:
            _put(copied, key, part)
    return copied


def _put(holder: Any, key: Any, part: Any) -> None:
    if isinstance(holder, Mapping):
        holder[key] = part  # type: ignore[index]  # a copy of one that has the key
    else:
        object.__setattr__(holder, key, part)


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a nested value: tensors, and objects that hold nothing."""
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


class State:
    """A copy of the buffers and attributes of modules, and of the states of random generators.

    Args:
        modules: The modules.
        draws: Whether to copy states of generators; to find the generators takes long.

    Attributes:
        tensors: The tensors that the modules held.
    """

    def __init__(self, modules: Sequence[nn.Module], *, draws: bool) -> None:
        self._modules = modules
        self._held: list[tuple[Any, dict[str, Any]]] = [
            (held, dict(held)) for each in modules for held in (vars(each), *tables_of(each)[1:])
        ]
        values: list[Any] = [value for _, before in self._held for value in before.values()]
        self._lists: list[Any] = [(each, copy.copy(each)) for each in values if type(each) in {list, dict, set}]
        self.tensors: list[torch.Tensor] = tensors_in(
            [each for each in values if type(each) not in PLAIN and not isinstance(each, nn.Module | dict)]
        )
        self._copies = [each.detach().clone() for each in self.tensors]
        self._drawing = (generator_states(modules), GlobalState.capture().copied(), torch_states()) if draws else None

    def put_back(self) -> None:
        """Put everything back."""
        for held, before in (*self._held, *self._lists):
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(before)
        with torch.no_grad():
            for tensor, copied in zip(self.tensors, self._copies, strict=True):
                if apart(tensor, copied):
                    tensor.data.copy_(copied)
        if self._drawing is not None:
            of_modules, of_all, of_torch = self._drawing
            set_generator_states(self._modules, of_modules)
            of_all.copied().install()
            put_torch_states(of_torch)

    def now(self) -> dict[str, Any]:
        """Return the present plain attributes, copies of tensors, and states of generators, by name."""
        found: dict[str, Any] = {
            "the state of random numbers": GlobalState.capture().values()[1:],
            "a generator that it holds": generator_states(self._modules),
        }
        for at, (held, _) in enumerate(self._held):
            of = f"module {at // 3}, {type(self._modules[at // 3]).__name__}"
            for name, value in held.items():
                leaves = [] if isinstance(value, nn.Module) or name == "_buffers" else leaves_of(value)
                for place, leaf in enumerate(leaves):
                    if isinstance(leaf, torch.Tensor) or type(leaf) in PLAIN:
                        copied = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                        found[f"{name} of {of}" + f" ({place})" * (place > 0)] = copied
        return found


def fixed_weights(tensor: torch.Tensor) -> torch.Tensor:
    """Return different weights for the numbers of a tensor, always the same ones."""
    places = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device)
    return (1 + 0.5 * (0.7 * places).sin()).view(tensor.shape).to(tensor.dtype)


def apart(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """Return the norm of the difference of two tensors, divided by the norm of the first one.

    Infinity stands for other shapes, dtypes, or places of infinities and NaNs.

    Args:
        a: One tensor.
        b: Another tensor.
        least: The least number to divide by.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not torch.equal(a.detach().isfinite(), b.detach().isfinite()):
        return float("inf")
    far = float((_finite(a) - _finite(b)).norm())
    return far / max(norm_of(a), least, 1e-300) if far else 0.0


def norm_of(tensor: torch.Tensor) -> float:
    """Return the norm of a tensor's finite numbers."""
    return float(_finite(tensor).norm())


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    return torch.where(wide.isfinite(), wide, 0)
