"""Find out whether a loss is a mean or a sum over the samples of a batch, by the operations that computed it."""

import math
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch

__all__ = ["Reduction", "reduction_of"]


class Reduction(Enum):
    """What a loss is of the samples of a batch."""

    MEAN = "a mean"
    SUM = "a sum"
    BOTH = "a mean and a sum"
    WEIGHED = "a mean by weights of the samples"
    UNKNOWN = "unknown"


# Operations that change nothing of what a loss is of its samples.
_PASSED_ON = ("Neg", "ToCopy", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Clone", "Alias", "Mul")
_ADDED = ("Add", "Sub")
_MOST_OPERATIONS = 32  # above the reductions: a loss is a short expression of them
_MEAN, _SUM = 1, 2  # as torch saves them


def reduction_of(loss: torch.Tensor, part: int, whole: int) -> Reduction:
    """Return what a loss is of the samples of this rank's part of a batch.

    A sum that is divided by the number of samples is a mean; one that is divided by the number of samples of the whole
    batch is a sum. A term that is of no batch, such as a penalty of weights, does not count.

    Args:
        loss: The root of a ``backward()``.
        part: How many samples this rank's part has.
        whole: How many the whole batch has.

    Examples:
        >>> x = torch.ones(4, requires_grad=True)
        >>> [reduction_of(loss, 4, 8).name for loss in (x.mean(), x.sum(), x.sum() / 4, x.sum() / 8, x.norm())]
        ['MEAN', 'SUM', 'MEAN', 'SUM', 'UNKNOWN']
    """
    found = {*_terms(loss.grad_fn, part, whole, [_MOST_OPERATIONS])}
    for certain in (Reduction.WEIGHED, Reduction.BOTH):
        if certain in found:
            return certain
    if {Reduction.MEAN, Reduction.SUM} <= found:
        return Reduction.BOTH
    return next((kind for kind in (Reduction.SUM, Reduction.MEAN) if kind in found), Reduction.UNKNOWN)


def _terms(node: Any, part: int, whole: int, left: list[int]) -> Iterator[Reduction]:
    """Yield what each term of a loss is."""
    left[0] -= 1
    if node is None or left[0] < 0:
        return
    name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
    inner = [each for each, _ in node.next_functions]
    reduction = getattr(node, "_saved_reduction", None)
    if reduction in {_MEAN, _SUM}:
        is_weighed = reduction == _MEAN and getattr(node, "_saved_weight", None) is not None and name.startswith("Nll")
        yield Reduction.WEIGHED if is_weighed else Reduction.MEAN if reduction == _MEAN else Reduction.SUM
    elif name == "Mean":
        yield Reduction.MEAN
    elif name == "Sum":
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        yield Reduction.SUM if sizes and sizes[0] == part else Reduction.UNKNOWN
    elif name == "Div" and inner[1:] in ([], [None]):
        yield from (_divided(term, node, part, whole) for term in _terms(inner[0], part, whole, left))
    elif name in _ADDED or (name in _PASSED_ON and sum(each is not None for each in inner) == 1):
        for each in inner:
            yield from _terms(each, part, whole, left)
    else:
        yield Reduction.UNKNOWN


def _divided(term: Reduction, node: Any, part: int, whole: int) -> Reduction:
    """Return what a term is that was divided by a constant."""
    divisor = getattr(node, "_saved_other", None)
    if term is not Reduction.SUM or not isinstance(divisor, torch.Tensor) or divisor.numel() != 1:
        return term
    by = float(divisor)
    if math.isclose(by, whole):
        return Reduction.SUM
    return Reduction.MEAN if math.isclose(by, part) else Reduction.UNKNOWN
