"""The costs of items: checked when the user passes them, read when items are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from ddp_patch.errors import InvalidOptionError
from ddp_patch.validation import as_index, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


CostValues: TypeAlias = Sequence[float] | np.ndarray[Any, Any] | torch.Tensor | Callable[[Any], float]
CostOf: TypeAlias = Literal["sum", "padded"]

# The default window, in steps; benchmarks/balance.py compares windows.
COST_WINDOW = 256


class Cost:
    """The costs of a loader's items, by which each step costs about the same on all ranks.

    Args:
        values: A sequence, array or tensor with one finite number of at least 0 for each index of ``loader.dataset``,
            in any unit, such as tokens; or a function of an index.
        of: What a batch costs: the ``"sum"`` of its samples' costs; or, if samples are ``"padded"`` to the longest,
            the largest cost times their number.
        window: How many steps are balanced at once. A larger window balances better, and delays the first batch:
            ``window * num_replicas`` batches are drawn before it.

    Attributes:
        of_batch: The argument ``of``.
        function: The user's function; None if the costs are numbers.
        length: How many numbers there are; None if the costs come from a function.

    Raises:
        InvalidOptionError: An argument has a value that it does not take.

    Examples:
        >>> import ddp_patch
        >>> ddp_patch.Cost([3, 1, 4], of="padded").of([2, [0, 1]]).tolist()
        [4.0, 6.0]
        >>> Cost([3, 1, 4]).of([(0, 2), (1,)], are_batches=True).tolist()
        [7.0, 1.0]
        >>> Cost(float, of="padded").of([[1, 3], [2]]).tolist()
        [6.0, 2.0]
    """

    def __init__(self, values: CostValues, of: CostOf = "sum", window: int = COST_WINDOW) -> None:
        if of not in get_args(CostOf):
            raise InvalidOptionError(
                f"Cost(..., of={of!r}) does not exist. Pass one of these: 'sum' means that a batch costs the sum of "
                "its samples' costs, 'padded' means that it costs the largest of these times their number."
            )
        steps = as_index(window)
        if steps is None or steps < 1:
            raise InvalidOptionError(f"Cost(..., window={window!r}) has no step in it. Pass an int of at least 1.")
        self.of_batch: CostOf = of
        self.window: int = steps
        self.function: Callable[[Any], float] | None = values if callable(values) else None
        self._each = np.empty(0) if callable(values) else _numbers(values)
        self.length: int | None = None if callable(values) else len(self._each)

    @property
    def described(self) -> dict[str, object]:
        """Facts that must be the same on every rank, by name: a digest of the numbers, or the function's name."""
        function = self.function
        if function is not None:
            kind = type(function)
            name = getattr(function, "__qualname__", kind.__qualname__)
            values = f"function {getattr(function, '__module__', kind.__module__)}.{name}"
        else:
            values = f"{self.length} numbers, {hashlib.blake2b(self._each.tobytes(), digest_size=16).hexdigest()}"
        return {"cost": values, "cost_of": self.of_batch, "cost_window": self.window}

    def of(self, items: Sequence[Any] | NDArray[Any], *, are_batches: bool = False) -> NDArray[np.float64]:
        """Return the cost of each item. An item is an index, or a batch of indices.

        Args:
            items: The items.
            are_batches: Whether every item is a batch. If False, a list, tensor or array is a batch, and a tuple is one
                key.

        Raises:
            InvalidOptionError: The function returns no number of at least 0; or an item is neither an index of the
                dataset nor a batch of indices.
        """
        indices = _as_indices(items)
        if indices is None:
            batches = [_listed(item, are_batches=are_batches) for item in items]
            each = self._of_each(list(chain.from_iterable(batches)))
            return self.of_batches(each, np.fromiter(map(len, batches), np.int64, len(batches)))
        each = self._of_each(indices.reshape(-1))
        return each if indices.ndim == 1 else self.of_batches(each, np.full(len(indices), indices.size // len(indices)))

    def _of_each(self, samples: Sequence[Any] | NDArray[Any]) -> NDArray[np.float64]:
        """Return the cost of each sample. Only a function knows the costs of keys that are not indices."""
        if self.function is not None:
            given: Sequence[Any] = samples.tolist() if isinstance(samples, np.ndarray) else samples
            values = list(map(self.function, given))
            try:
                numbers = np.fromiter(map(float, values), np.float64, len(values))
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise InvalidOptionError(
                    f"cost= gave a value that is not a number: {error}. Return one, at least 0."
                ) from error
            return _checked(numbers, given)
        indices = _as_indices(samples)
        if indices is None or indices.ndim != 1:
            raise InvalidOptionError(
                f"cost= has one number for each index of the dataset, and the sampler gives item {shown(samples[0])}, "
                "which is neither an index nor a batch of them. Pass a function of what the sampler gives for one "
                "sample."
            )
        try:
            found: NDArray[np.float64] = self._each[indices]
        except IndexError as error:
            raise InvalidOptionError(
                f"cost= has {self.length} numbers, and the sampler gives an index beyond them ({error}). Pass one "
                "number for each index of the dataset."
            ) from None
        return found

    def of_batches(self, each: NDArray[np.float64], sizes: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Return the costs of batches from the costs of their samples.

        Args:
            each: The cost of each sample, batch after batch, shape (samples,).
            sizes: How many samples each batch has, shape (batches,).
        """
        found = np.zeros(len(sizes))
        if len(each):
            begins, filled = np.cumsum(sizes) - sizes, sizes > 0
            reduced = np.add if self.of_batch == "sum" else np.maximum
            found[filled] = reduced.reduceat(each, begins[filled])
        return found if self.of_batch == "sum" else found * sizes


def _numbers(given: Any) -> NDArray[np.float64]:
    """Return a copy of the costs as an array; refuse anything else."""
    try:
        if isinstance(given, torch.Tensor):
            given = given.detach().cpu().double()  # numpy has no bfloat16
        found = np.asarray(given if hasattr(given, "__array__") else list(given))
        is_row = not isinstance(given, Mapping | Set) and found.ndim == 1 and found.dtype.kind in "iuf"
        why = "" if is_row else f"it is an array of {found.dtype} of shape {found.shape}, or has no order"
    except Exception as error:  # noqa: BLE001 - the user's object
        why = str(error)
    if why:
        raise InvalidOptionError(
            f"cost= is a {type(given).__name__} that cannot be read as numbers: {why}. Pass a sequence, array or "
            "tensor with one number of at least 0 for each index, or a function of an index."
        )
    return _checked(found.astype(np.float64), range(len(found)))


def _checked(found: NDArray[np.float64], items: Sequence[Any]) -> NDArray[np.float64]:
    """Return the costs of some items; refuse any that is negative, infinite or not a number."""
    wrong = np.flatnonzero(~((found >= 0) & (found < np.inf)))
    if len(wrong):
        raise InvalidOptionError(
            f"cost= says that item {shown(items[wrong[0]])} costs {found[wrong[0]]}. A cost is a finite number of at "
            "least 0: correct it."
        )
    return found


def _as_indices(items: Sequence[Any] | NDArray[Any]) -> NDArray[Any] | None:
    """Return indices as an array of one dimension, or batches of equal size as one of two; None for anything else."""
    if not len(items):
        return np.empty(0, np.int64)
    if isinstance(items[0], tuple | str | bytes | Mapping):
        return None
    try:
        found = np.asarray(items)
    except (TypeError, ValueError, RuntimeError):  # batches of several sizes
        return None
    return found if found.dtype.kind in "iu" and found.ndim <= 2 and 0 not in found.shape else None


def _listed(item: Any, *, are_batches: bool) -> Sequence[Any]:
    """Return the keys of the samples in an item, which is a batch or one key."""
    if isinstance(item, torch.Tensor | np.ndarray):
        listed: list[Any] = item.reshape(-1).tolist()
        return listed
    if isinstance(item, list):
        return item
    is_batch = are_batches and isinstance(item, Iterable) and not isinstance(item, str | bytes | Mapping)
    return list(item) if is_batch else [item]
