"""Checks of values that users pass: whole numbers, seconds, flags, a rank."""

import operator
import reprlib
from datetime import timedelta
from typing import Any, TypeGuard

import numpy as np

from ddp_patch.errors import InvalidOptionError

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80
_short.maxlevel = 3


def counted(number: int, unit: str) -> str:
    """Return a number with its unit in the singular or plural."""
    plural = {"batch": "batches", "pass": "passes"}.get(unit, f"{unit}s")
    return f"{number:,} {unit if number == 1 else plural}"


def shown(value: object) -> str:
    """Return a value's repr for an error; of a long one, the beginning and the end.

    Examples:
        >>> shown("abc"), len(shown("a" * 10**6)), shown([[[[[1]]]]])
        ("'abc'", 80, '[[[[...]]]]')
    """
    try:
        return " ".join(map(str.strip, _short.repr(value).splitlines()))  # arrays have several lines
    except Exception:  # noqa: BLE001 - the user's __repr__, or a number with more digits than Python writes
        return f"a {type(value).__name__}"


def as_index(value: Any) -> int | None:
    """Return a whole number, which may be numpy's or torch's, as an int; None for anything else, bools included.

    Examples:
        >>> as_index(np.int64(3)), as_index(3.0), as_index(True)
        (3, None, None)
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # raised for tensors and arrays of other numbers
        return None


def whole_number(name: str, value: object) -> int:
    """Return a whole number, which may be numpy's or torch's, as an int; raise InvalidOptionError for anything else."""
    number = as_index(value)
    if number is None:
        raise InvalidOptionError(f"{name}={value!r} is a {type(value).__name__}, not an int. Pass a whole number.")
    return number


def is_seconds(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def seconds(value: object) -> float | None:
    """Return the seconds of a number or a ``timedelta``; None for anything else.

    Examples:
        >>> seconds(90), seconds(timedelta(minutes=1.5)), seconds("90")
        (90, 90.0, None)
    """
    given = value.total_seconds() if isinstance(value, timedelta) else value
    return given if is_seconds(given) else None


def check_flag(name: str, value: object, hint: str = "") -> None:
    """Raise InvalidOptionError unless a value is True or False.

    Args:
        name: The option.
        value: The value that the user passed.
        hint: What to do instead, if the value was probably meant for another option.
    """
    if not isinstance(value, bool | np.bool_):
        raise InvalidOptionError(
            f"{name}={value!r} is a {type(value).__name__}, neither True nor False. Pass one of these.{hint}"
        )


def check_rank(rank: int, num_replicas: int) -> None:
    """Raise InvalidOptionError unless ``num_replicas`` is at least 1 and ``rank`` in ``range(num_replicas)``."""
    if num_replicas < 1:
        raise InvalidOptionError(f"num_replicas={num_replicas} is too small: pass the number of ranks, at least 1.")
    if not 0 <= rank < num_replicas:
        raise InvalidOptionError(
            f"rank={rank} is out of range for num_replicas={num_replicas}: ranks count from 0 to {num_replicas - 1}. "
            "Pass this process's rank within the group."
        )
