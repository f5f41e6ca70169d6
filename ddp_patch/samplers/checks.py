"""What samplers are given, checked: numbers, seeds and sequences of them."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError

__all__ = ["Integers", "flag", "integers", "randomness", "sequence", "whole"]

_LARGEST = np.iinfo(np.int64).max

Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


def whole(name: str, value: object, least: int, reason: str, bits: int | None = None) -> int:
    """Return a value as an int, or raise SamplerError unless it is a whole number of at least ``least``.

    Args:
        name: What it is called in errors.
        value: What was given.
        least: What it is at least.
        reason: Why it must be.
        bits: It is less than 2 to the power of these; without them it may be of any size.
    """
    is_whole = isinstance(value, SupportsIndex) and not isinstance(value, bool | np.bool)
    number = _index(value) if is_whole else None
    if number is None or number < least:
        raise SamplerError(f"{name}={value!r} is not a whole number of at least {least}: {reason}. Pass such an int.")
    if bits is not None and number.bit_length() > bits:
        raise SamplerError(
            f"{name}={number} is more than 2**{bits} - 1: positions are computed in 64 bits. Pass at most that."
        )
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


def sequence(name: str, values: Any, reason: str) -> npt.NDArray[Any] | list[Any]:
    """Return a value for each sample in an array, or in a list, or raise SamplerError if they are in no order."""
    if isinstance(values, torch.Tensor):
        is_known = values.dtype not in (torch.bfloat16,)  # to numpy
        return (values if is_known else values.float()).numpy(force=True)
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, Mapping | Set) or not isinstance(values, Iterable):
        raise SamplerError(
            f"{name}={values!r} is no sequence (type {type(values).__name__}): {reason}. Pass a list, array or tensor "
            "with one for each sample."
        )
    return list(values)


def integers(name: str, values: Integers, least: int, reason: str) -> npt.NDArray[np.int64]:
    """Return whole numbers of at least ``least`` as one array.

    Raises:
        SamplerError: There is none, they are no sequence of whole numbers, or one is less, or more than 64 bits hold;
            it is named by its index.
    """
    given = sequence(name, values, reason)
    found = given if isinstance(given, np.ndarray) else _as_array(given)
    if found.ndim != 1 or len(found) == 0:
        raise SamplerError(
            f"{name} has the shape {found.shape}: {reason}. Pass a list, array or tensor with one whole number for "
            "each sample, and at least one."
        )
    odd = [] if found.dtype.kind in "iu" else [i for i, value in enumerate(found.tolist()) if type(value) is not int]
    if odd:
        value = found[odd[0]]
        raise SamplerError(
            f"{name}[{odd[0]}]={value.item() if isinstance(value, np.generic) else value!r} is not a whole number: "
            f"{reason}. Pass ints."
        )
    for is_odd, how in ((found < least, f"less than {least}"), (found > _LARGEST, "more than 2**63 - 1")):
        if is_odd.any():
            where = int(np.argmax(is_odd))
            raise SamplerError(
                f"{name}[{where}]={found[where]} is {how}: {reason}. Correct it or leave that sample out."
            )
    return found.astype(np.int64)


def _as_array(values: list[Any]) -> npt.NDArray[Any]:
    # numpy would make True a 1 among ints, 1 a 1.0 among floats, and of ints of over 64 bits floats: these lists keep
    # what they hold.
    kinds = set(map(type, values))
    if not kinds & {bool, float}:
        try:
            found = np.asarray(values)
        except ValueError:  # of several lengths
            return np.asarray(values, dtype=object)
        if found.dtype.kind != "f":
            return found
    return np.asarray(values, dtype=object)


def randomness(seed: object, generator: torch.Generator | None) -> int | None:
    """Return the seed as an int, or None; raise SamplerError unless at most one is given, and is what it is called."""
    if seed is not None and generator is not None:
        raise SamplerError(
            f"seed={seed!r} and generator={generator!r} were both given: an order follows from one of them. Pass one, "
            "or neither to draw from torch's global generator."
        )
    if generator is not None and not isinstance(cast(object, generator), torch.Generator):
        raise SamplerError(
            f"generator={generator!r} is none (type {type(generator).__name__}), and orders are drawn as torch's "
            "samplers draw them. Pass a torch.Generator."
        )
    return None if seed is None else whole("seed", seed, 0, "every epoch's order is derived from it")
