"""What a loss of a part of a batch is of its samples: a mean, a sum or neither; and what the whole batch's loss is."""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp_patch.compat.private_torch import operation_number

__all__ = ["COMPILED", "MEAN", "SUM", "UNKNOWN", "WEIGHED", "Losses", "Reductions", "is_additive"]

MEAN, SUM, WEIGHED = "a mean", "a sum", "a mean by weights of the samples"
UNKNOWN = "of a form that is not known to be a mean or a sum over samples"
COMPILED = "compiled, and taken for a mean over samples"
# Operations of which each input is a term, that changes nothing of what it is of the samples.
_TERMS = ("Add", "Sub", "Rsub", "Stack", "Cat")
_PASSED_ON = ("Neg", "ToCopy", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Clone", "Alias", "NanToNum")
_SCALED = ("Mul", "Div")
_PROPORTIONAL = (*_SCALED, "Neg")
_MOST_OPERATIONS = 300  # that a loss is made of, above what it reduces
_MOST_OF_WEIGHTS = 64
_SAVED = {1: MEAN, 2: SUM}  # as torch saves them
_ROUNDING = 1e-6  # of the largest derivative: below it, one is zero
_grad = torch.autograd.grad
_detach = torch.Tensor.detach
_MOST_READ = 16  # losses that are kept of those that were read


@dataclass(frozen=True)
class Reductions:
    """Tells what losses are of the samples of this rank's part of a batch.

    Attributes:
        part: How many samples this rank's part has.
        whole: How many the whole batch has.
        usual: How many most batches have, by which a script may divide all.
        weights: What is trained.
        since: How many operations were there when the batch was taken: what is older is of another one.

    Examples:
        >>> x, of_half = torch.ones(4, requires_grad=True), Reductions(4, 8)
        >>> [*map(str, (*of_half.of(x.sum() / 4), *of_half.of(x.sum() / 8)))]
        ['a mean', 'a sum']
        >>> Reductions(4, 8, weights={x}).of(x.norm())
        set()
    """

    part: int
    whole: int
    usual: int = 0
    weights: Container[Any] = ()
    since: int = 0

    def of(self, loss: torch.Tensor, terms: set[Any] | None = None) -> set[str]:
        """Return what the terms of a loss are of the samples.

        A sum that is divided by the number of samples is a mean; one that is divided by the number of samples of the
        whole batch is a sum. A term that is of no batch, such as a penalty of weights, does not count.

        Args:
            loss: The root of a ``backward()``.
            terms: Gets the operations that make up the loss, down to what reduces or scales.
        """
        found, seen = set[str](), 0
        todo: list[tuple[Any, tuple[tuple[str, float], ...]]] = [(loss.grad_fn, ())]
        while todo and seen < _MOST_OPERATIONS:
            node, by = todo.pop()
            seen += 1
            if node is None or _is_of_weights(node, self.weights):
                continue
            if terms is not None and not by:
                terms.add(node)
            name, inner = _name_of(node), _inputs(node)
            kind = self._reduction(node, name)
            if kind and operation_number(node) < self.since:
                found.add(UNKNOWN)
            elif kind in {MEAN, SUM}:
                found.add(self._scaled(kind, _size_of(node), by))
            elif kind:
                found.add(kind)
            elif name in _SCALED and len(inner) == 1:
                todo.append((inner[0], (*by, (name, _number(node)))))
            elif name in (*_TERMS, *_PASSED_ON, "Mul", "Sum", "Mean"):
                todo += [(each, by) for each in inner]
            elif name != "AccumulateGrad":
                found.add(COMPILED if name.startswith("Compiled") else UNKNOWN)
        return found | ({UNKNOWN} if todo else set())

    def _reduction(self, node: Any, name: str) -> str:
        """Return what an operation makes of the samples; nothing if it does not reduce these."""
        sizes, kind = _size_of(node), _SAVED.get(getattr(node, "_saved_reduction", 0), "")
        if name.startswith("NllLoss") and kind:
            weight, total, target = (getattr(node, f"_saved_{of}", None) for of in ("weight", "total_weight", "target"))
            rows = 0 if target is None else target.numel()
            are_some_left_out = total is not None and total.device.type == "cpu" and bool(total != rows)
            if kind == MEAN and (weight is not None or are_some_left_out):
                return WEIGHED
            return kind if rows % self.part == 0 else UNKNOWN
        if kind:
            return kind if self._has_rows(sizes) else UNKNOWN
        if name not in {"Mean", "Sum"} or not self._has_rows(sizes):
            return ""
        below = node.next_functions[0][0]
        if below is not None and _name_of(below) in {"Mean", "Sum"} and self._reduces_rows(below):
            return UNKNOWN  # which of both is that of the samples
        return MEAN if name == "Mean" else SUM

    def _has_rows(self, sizes: Sequence[int]) -> bool:
        return any(size and size % self.part == 0 for size in sizes)

    def _reduces_rows(self, node: Any) -> bool:
        sizes = _size_of(node)
        dims = {dim if dim < len(sizes) else dim - 2**64 + len(sizes) for dim in getattr(node, "_saved_dim", ())}
        return 0 in dims and sizes[0] % self.part == 0

    def _scaled(self, kind: str, sizes: Sequence[int], by: Sequence[tuple[str, float]]) -> str:
        """Return what a mean or a sum is that was multiplied or divided by some numbers."""
        if kind == MEAN:  # which is a sum if it is multiplied by the number of samples
            return UNKNOWN if self.part > 1 and ("Mul", self.part) in by else MEAN
        divisors = [number if name == "Div" else 1 / number for name, number in by if name == "Div" or number]

        def are(*numbers: int) -> bool:
            return any(math.isclose(each, number) for each in divisors for number in numbers)

        is_mean, is_constant = are(self.part, math.prod(sizes)), self.part != self.whole and are(self.whole, self.usual)
        if is_mean or is_constant:
            return UNKNOWN if is_mean and is_constant else MEAN if is_mean else SUM
        return UNKNOWN if any(name == "Div" for name, _ in by) else SUM


def _name_of(node: Any) -> str:
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _inputs(node: Any) -> list[Any]:
    """Return the operations whose results an operation takes, of those that have a gradient."""
    return [each for each, _ in node.next_functions if each is not None]


def _size_of(node: Any) -> Sequence[int]:
    """Return the shape of what an operation reduces."""
    saved = getattr(node, "_saved_self", None)
    return tuple(saved.shape) if isinstance(saved, torch.Tensor) else getattr(node, "_saved_self_sym_sizes", ())


def _number(node: Any) -> float:
    """Return by which number an operation multiplies or divides; none if that is not known."""
    other = getattr(node, "_saved_other", None)
    if isinstance(other, torch.Tensor) and other.numel() == 1 and other.device.type == "cpu":
        return float(other)
    return float(other) if isinstance(other, int | float) else math.nan


def _is_of_weights(node: Any, weights: Container[Any]) -> bool:
    """Return whether a term is of nothing but what is trained."""
    todo, seen = [node], set[Any]()
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        if each is None or len(seen) > _MOST_OF_WEIGHTS or _name_of(each).startswith(("Embedding", "Index", "Gather")):
            return False
        if hasattr(each, "variable"):
            if each.variable not in weights:
                return False
        else:
            todo += [inner for inner, _ in each.next_functions]
    return True


def is_additive(loss: torch.Tensor, outputs: torch.Tensor, samples: int) -> bool:
    """Return whether a loss adds up what its samples give, as far as a model's outputs for these show.

    A mixed second derivative by the outputs of two samples is zero then. It is computed between two halves of them.

    Args:
        loss: The loss.
        outputs: What the loss was computed from, with a row for each sample, or several such tables after each other.
        samples: How many samples there are.

    Examples:
        >>> x = torch.arange(4.0, requires_grad=True)
        >>> is_additive(x.square().mean(), x, 4), is_additive(x.square().mean().sqrt(), x, 4)
        (True, False)
    """
    table = samples if len(outputs) % samples == 0 else len(outputs)
    is_first = (torch.arange(len(outputs), device=outputs.device) % table) < table // 2
    try:
        (slopes,) = _grad(loss, outputs, create_graph=True)
        some = slopes[is_first]
        numbers = torch.arange(some.numel(), dtype=some.dtype, device=some.device)
        (changes,) = _grad((some * numbers.cos().view_as(some)).sum(), outputs, retain_graph=True)
    except Exception:  # noqa: BLE001 - the loss is not of these, or is linear; or its operations cannot be derived twice
        return True
    return not changes[~is_first].abs().max() > _ROUNDING * changes.abs().max()


class Losses:
    """The losses of one step: each is of this rank's part of a batch, and has one of the whole batch."""

    def __init__(self) -> None:
        # By the operation that computed a part's loss, that and the whole batch's: of roots of ``backward()``; and of
        # what was read before, which holds what computed it.
        self._of_roots: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_read: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._terms, self._kinds = set[Any](), set[str]()  # the operations of the latest roots; what these are

    def forget(self) -> None:
        """Forget the whole batches' losses: those of the next step follow."""
        self._of_roots, self._of_read = {}, {}

    def keep_read(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Keep the whole batch's loss for that of a part which was read."""
        if len(self._of_read) >= _MOST_READ:
            self._of_read = {}
        self._of_read[part.grad_fn] = _detach(part), whole

    def keep_root(self, root: torch.Tensor, whole: torch.Tensor) -> None:
        """Keep the whole batch's loss for the root of a ``backward()``, and for what that is directly a multiple of."""
        node: Any = root.grad_fn
        is_multiple = node is not None and _name_of(node) in _SCALED and len(_inputs(node)) == 1
        for each in [node, *_inputs(node)] if is_multiple else [node]:
            self._of_roots[each] = _detach(root), whole

    def whole_of(self, part: torch.Tensor) -> torch.Tensor | None:
        """Return the whole batch's loss for that of a part, where it is kept, or that of what this is a multiple of."""
        node: Any = part.grad_fn
        while (found := self._of_roots.get(node) or self._of_read.get(node)) is None:
            inner = _inputs(node)
            if len(inner) != 1 or _name_of(node) not in _PROPORTIONAL:
                return None
            node = inner[0]
        of_part, whole = (each.view(part.shape) for each in found)
        own = _detach(part)
        return whole if not of_part or torch.equal(own, of_part) else own * (whole / of_part)

    def kinds_of_roots(self, roots: Iterable[Any], reductions: Reductions) -> set[str]:
        """Return what the terms of the roots of a ``backward()`` are of the samples."""
        self._terms = set()
        self._kinds = _kinds_of((root for root in roots if torch.is_tensor(root)), reductions, self._terms)
        return self._kinds

    def kinds_of(self, loss: torch.Tensor, reductions: Callable[[], Reductions]) -> set[str]:
        """Return what the terms of a loss that is read are of the samples."""
        return self._kinds if loss.grad_fn in self._terms else _kinds_of([loss], reductions())


def _kinds_of(losses: Iterable[torch.Tensor], reductions: Reductions, terms: set[Any] | None = None) -> set[str]:
    try:
        return {kind for loss in losses for kind in reductions.of(loss, terms)}
    except RuntimeError:  # backward() has freed what shows it
        return {UNKNOWN}
