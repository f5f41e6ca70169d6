"""What samplers are given, checked: numbers, seeds and sequences of them."""

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError

__all__ = ["Integers", "flag", "integers", "randomness", "whole"]

Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


def whole(name: str, value: object, least: int, reason: str) -> int:
    """Return a value as an int, or raise SamplerError unless it is a whole number of at least ``least``."""
    is_whole = isinstance(value, SupportsIndex) and not isinstance(value, bool | np.bool)
    number = _index(value) if is_whole else None
    if number is None or number < least:
        raise SamplerError(f"{name}={value!r} is not a whole number of at least {least}: {reason}. Pass such an int.")
    return number


def _index(value: Any) -> int | None:
    try:
        return int(value.__index__())
    except TypeError:  # a tensor of fractions, say, has the method and refuses
        return None


def flag(name: str, value: object, reason: str) -> bool:
    """Return a value as a bool, or raise SamplerError if it is none."""
    if not isinstance(value, bool):
        raise SamplerError(f"{name}={value!r} is neither True nor False: {reason}. Pass one of them.")
    return value


def integers(name: str, values: Integers, least: int, reason: str) -> npt.NDArray[np.int64]:
    """Return whole numbers of at least ``least`` as one array.

    Raises:
        SamplerError: There is none, they are no sequence of whole numbers, or one is less; it is named by its index.
    """
    found = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else _as_array(values)
    if found.ndim != 1 or len(found) == 0:
        raise SamplerError(
            f"{name} has the shape {found.shape}: {reason}. Pass a list, array or tensor with one whole number for "
            "each sample, and at least one."
        )
    if found.dtype.kind not in "iu":
        odd = next((i for i, value in enumerate(found.tolist()) if type(value) is not int), 0)
        raise SamplerError(
            f"{name}[{odd}]={found[odd].item() if found.dtype.kind != 'O' else found[odd]!r} is not a whole number: "
            f"{reason}. Pass ints."
        )
    if found.min() < least:
        where = int(np.argmax(found < least))
        raise SamplerError(
            f"{name}[{where}]={found[where]} is less than {least}: {reason}. Correct it or leave that sample out."
        )
    return found.astype(np.int64)


def _as_array(values: Any) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    # numpy would make True a 1 among ints, and 1 a 1.0 among floats: such lists keep what they hold.
    plain = list(values)
    return np.asarray(plain, dtype=object if any(type(v) is bool or type(v) is float for v in plain) else None)


def randomness(seed: int | None, generator: torch.Generator | None) -> None:
    """Raise SamplerError unless at most one of them is given, and is what it is called."""
    if seed is not None and generator is not None:
        raise SamplerError(
            f"seed={seed!r} and generator={generator!r} were both given: an order follows from one of them. Pass one, "
            "or neither to draw from torch's global generator."
        )
    if seed is not None:
        whole("seed", seed, 0, "every epoch's order is derived from it")
    if generator is not None and not isinstance(cast(object, generator), torch.Generator):
        raise SamplerError(
            f"generator={generator!r} is none (type {type(generator).__name__}), and orders are drawn as torch's "
            "samplers draw them. Pass a torch.Generator."
        )
