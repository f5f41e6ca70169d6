"""Checks of the arguments that samplers take: numbers, flags, sequences, seeds and generators."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.validation import as_index

__all__ = ["Integers", "flag", "integers", "randomness", "sequence", "whole"]


_LARGEST = np.iinfo(np.int64).max

Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


def whole(name: str, value: object, least: int, reason: str, bits: int | None = None) -> int:
    """Return a whole number as an int, or raise SamplerError if it is something else, too small or too large.

    Args:
        name: The argument's name.
        value: The argument.
        least: The smallest number allowed.
        reason: Why the argument must be such a number, for the error message.
        bits: The number must be less than 2**bits; None for any size.

    Raises:
        SamplerError: The value is not such a number.

    Examples:
        >>> whole("batch_size", np.int32(8), 1, "it is the number of samples in a batch")
        8
    """
    number = as_index(value)
    if number is None or number < least:
        raise SamplerError(f"{name}={value!r} is not a whole number of at least {least}: {reason}. Pass such an int.")
    if bits is not None and number.bit_length() > bits:
        raise SamplerError(
            f"{name}={number} is more than 2**{bits} - 1: positions are computed in 64 bits. Pass at most that."
        )
    return number


def flag(name: str, value: object, reason: str) -> bool:
    """Return a bool, or raise SamplerError if the value is something else."""
    if not isinstance(value, bool):
        raise SamplerError(f"{name}={value!r} is neither True nor False: {reason}. Pass one of them.")
    return value


def sequence(name: str, values: Any, reason: str) -> npt.NDArray[Any] | list[Any]:
    """Return a value for each sample, as an array or a list, or raise SamplerError if they have no order."""
    if isinstance(values, torch.Tensor):
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True)  # numpy has no bfloat16
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, Mapping | Set) or not isinstance(values, Iterable):
        raise SamplerError(
            f"{name}={values!r} is not a sequence (type {type(values).__name__}): {reason}. Pass a list, array or "
            "tensor with one for each sample."
        )
    return list(values)


def integers(name: str, values: Integers, least: int, reason: str) -> npt.NDArray[np.int64]:
    """Return whole numbers of at least ``least`` as one array.

    Args:
        name: The argument's name.
        values: The argument.
        least: The smallest number allowed.
        reason: Why the argument must be such numbers, for the error message.

    Returns:
        The numbers, in the shape ``(samples,)``.

    Raises:
        SamplerError: There are no numbers, they are no flat sequence of whole numbers, or one is too small or needs
            more than 64 bits. The message names the first one by its index.

    Examples:
        >>> integers("lengths", torch.tensor([3, 5]), 1, "a sample has tokens")
        array([3, 5])
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
    """Return the values as an array, which holds objects if numpy would change any of them.

    Among ints numpy makes True a 1, among floats it makes 1 a 1.0, and it turns ints of more than 64 bits into floats.
    """
    kinds = set(map(type, values))
    if not kinds & {bool, float}:
        try:
            found = np.asarray(values)
        except ValueError:  # values of several lengths
            return np.asarray(values, dtype=object)
        if found.dtype.kind != "f":
            return found
    return np.asarray(values, dtype=object)


def randomness(seed: object, generator: torch.Generator | None) -> int | None:
    """Return the seed as an int or None, and check the generator.

    Raises:
        SamplerError: Both are given, or one is of another kind.

    Examples:
        >>> randomness(7, None)
        7
    """
    if seed is not None and generator is not None:
        raise SamplerError(
            f"seed={seed!r} and generator={generator!r} were both given: an order follows from one of them. Pass one, "
            "or neither to draw from torch's global generator."
        )
    if generator is not None and not isinstance(cast(object, generator), torch.Generator):
        raise SamplerError(
            f"generator={generator!r} is not a generator (type {type(generator).__name__}), and orders are drawn as "
            "torch's samplers draw them. Pass a torch.Generator."
        )
    return None if seed is None else whole("seed", seed, 0, "every epoch's order is derived from it")
