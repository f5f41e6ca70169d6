"""Let what sees the whole batch see it in divided calls: batch normalisation, and means of torch's losses.

The mean of a loss over rows that a call has returned, and that nobody has read, is a sum over each rank's rows, too.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import Function
from torch.nn import functional

from ddp_patch.running.divided import Later, Part, mixed, sums

_unflat: Callable[..., torch.Tensor] = torch.unflatten
_untraced: Callable[[Any], Any] = torch.compiler.disable  # what communicates is not traced


def whole_batch(part_now: Callable[[], Part | None], stack: ExitStack) -> None:
    """Let batch normalisation, and means of torch's over what is no row, see the whole batch in divided calls.

    Args:
        part_now: Returns the part of the divided call that runs now.
        stack: Ends that when it closes.
    """

    def put(name: str, ours: Callable[..., Any]) -> None:
        theirs = getattr(functional, name)

        @_untraced
        def of_part(part: Part | None, *args: Any, **options: Any) -> Any:
            if part is not None:
                part.inner += 1
            return ours(theirs, part, *args, **options)

        def call(*args: Any, **options: Any) -> Any:
            part = part_now()
            is_divided = part is not None or (args and type(args[0]) is Later)
            return of_part(part, *args, **options) if is_divided else theirs(*args, **options)

        stack.enter_context(patch.object(functional, name, wraps(theirs)(call)))

    put("batch_norm", _batch_norm)
    put("cross_entropy", _mean_loss)
    put("nll_loss", _mean_loss)


def _given(theirs: Callable[..., torch.Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a function, by name."""
    bound = signature(theirs).bind(*args, **options)
    bound.apply_defaults()
    return bound.arguments


def _batch_norm(theirs: Callable[..., torch.Tensor], part: Part | None, *args: Any, **options: Any) -> torch.Tensor:
    given = _given(theirs, args, options)
    if part is None or not given["training"]:
        return theirs(*args, **options)
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    return _normalised(part, *map(given.get, names))


def _statistics(part: Part, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean and variance of each channel of the whole batch, and of how many numbers they are."""
    own_var, own_mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    row, rank = torch.cat([own_mean, own_var, x.new_full((1,), x.numel() // x.shape[1])]), part.lockstep.rank
    (rows,) = mixed(part, functional.pad(row[None], (0, 0, rank, part.lockstep.ranks - rank - 1)))
    (means, variances), counts = _unflat(rows[:, :-1], 1, (2, -1)).unbind(1), rows[:, -1:]
    mean, n = (means * counts).sum(0) / counts.sum(), counts.sum()
    return mean, ((variances + (means - mean).square()) * counts).sum(0) / n, n


def _shaped(of_channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return of_channels.view(1, -1, *[1] * (like.dim() - 2))


class _Normalised(Function):
    """Batch normalisation by the whole batch. Gradients that autograd derives of its formula would lose digits."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Part,
        x: torch.Tensor,
        weight: Any,
        bias: Any,
        of_mean: Any,
        of_var: Any,
        momentum: Any,
        eps: Any,
    ) -> Any:
        mean, var, n = _statistics(part, x.float() if x.dtype in {torch.float16, torch.bfloat16} else x)
        for kept, found in ((of_mean, mean), (of_var, var * (n / (n - 1)))):
            if kept is not None:
                kept.data.lerp_(found.to(kept.dtype), momentum)  # as torch's own, it is no change that autograd sees
        ctx.save_for_backward(x, weight, bias, mean, torch.rsqrt(var + eps), n)
        ctx.of = part, eps
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias, mean, scale, n = ctx.saved_tensors
        part, eps = ctx.of
        if torch.is_grad_enabled():  # to be derived again
            mean, var, _ = _statistics(part, x.to(mean.dtype))
            normal = (x - _shaped(mean, x)) * _shaped(torch.rsqrt(var + eps), x)
            scaled = normal if weight is None else normal * _shaped(weight, x)
            result = scaled if bias is None else scaled + _shaped(bias, x)
            given = [each for each in (x, weight, bias) if each is not None and each.requires_grad]
            slopes = iter(torch.autograd.grad(result, given, grad, create_graph=True))
            found = (next(slopes) if each is not None and each.requires_grad else None for each in (x, weight, bias))
            return (None, *found, None, None, None, None)
        wide, dims = grad.to(mean.dtype), [0, *range(2, x.dim())]
        normal = (x - _shaped(mean, x)) * _shaped(scale, x)
        sums_of = torch.stack([(wide * normal).sum(dims), wide.sum(dims)])
        (found,) = part.lockstep.sum(part.doing, [sums_of]) or [sums_of]
        mean_product, mean_slope = (_shaped(each, x) for each in found / n)
        inner = normal.mul_(mean_product).add_(mean_slope).neg_().add_(wide)
        of_x = inner.mul_(_shaped(scale if weight is None else scale * weight, x)).to(x.dtype)
        of_others = (
            None if each is None else slope.to(each.dtype) for each, slope in zip((weight, bias), sums_of, strict=True)
        )
        return (None, of_x, *of_others, None, None, None, None)


_normalised: Callable[..., torch.Tensor] = _Normalised.apply


def _mean_loss(theirs: Callable[..., torch.Tensor], part: Part | None, *args: Any, **options: Any) -> torch.Tensor:
    """Return a mean over all ranks' rows: of a part's call, or of rows that nobody has read yet."""
    given = _given(theirs, args, options)
    if given["reduction"] != "mean" or given["size_average"] is not None or given["reduce"] is not None:
        return theirs(*args, **options)
    if part is not None:
        total, by = mixed(part, *_sums(theirs, given))
        return total * by.reciprocal()
    later, target = given["input"], given["target"]
    part, layout, own = later.of_part
    if later.is_read or layout.dim or target.requires_grad or len(target) != len(later):
        return theirs(*args, **options)
    total, by = sums(part, *_sums(theirs, {**given, "input": own, "target": part.cut(target, layout)}))
    return total * by.reciprocal()


def _sums(theirs: Callable[..., torch.Tensor], given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two sums whose ratio a mean is: of losses, and of the weights of what counts."""
    total, target, weight = theirs(**{**given, "reduction": "sum"}), given["target"], given["weight"]
    if target.is_floating_point():  # of classes' probabilities
        return total, total.new_tensor(target.numel() // target.shape[1 if target.dim() > 1 else 0])
    counts = target != given["ignore_index"]
    by = counts if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0.0)
    return total, by.sum().to(total.dtype)
