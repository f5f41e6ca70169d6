"""Batch normalisation and mean losses of torch, computed over the rows of all ranks within divided calls."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import Function
from torch.nn import functional

from ddp_patch.running.divided import Part, mixed

_unflat: Callable[..., torch.Tensor] = torch.unflatten
_untraced: Callable[[Any], Any] = torch.compiler.disable  # what communicates is not traced


def whole_batch(part_now: Callable[[], Part | None], stack: ExitStack) -> None:
    """Replace torch's functions while a divided call runs.

    Args:
        part_now: Returns the part of the divided call that runs now; None if none runs.
        stack: Puts torch's functions back when it closes.
    """

    def put(name: str, ours: Callable[..., Any]) -> None:
        theirs = getattr(functional, name)
        takes = signature(theirs)

        @_untraced
        def of_part(part: Part, *args: Any, **options: Any) -> Any:
            part.inner += 1
            bound = takes.bind(*args, **options)
            bound.apply_defaults()
            return ours(theirs, part, bound.arguments)

        def call(*args: Any, **options: Any) -> Any:
            part = part_now()
            return theirs(*args, **options) if part is None else of_part(part, *args, **options)

        stack.enter_context(patch.object(functional, name, wraps(theirs)(call)))

    put("batch_norm", _batch_norm)
    put("cross_entropy", _mean_loss)
    put("nll_loss", _mean_loss)


def _batch_norm(theirs: Callable[..., torch.Tensor], part: Part, given: dict[str, Any]) -> torch.Tensor:
    if not given["training"]:
        return theirs(**given)
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    return _normalised(part, *map(given.get, names))


def _statistics(part: Part, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and variance of each channel over all ranks, and how many numbers of a channel there are."""
    x = x.float() if x.dtype in {torch.float16, torch.bfloat16} else x
    own_var, own_mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    row, rank = torch.cat([own_mean, own_var, x.new_full((1,), x.numel() // x.shape[1])]), part.lockstep.rank
    (rows,) = mixed(part, functional.pad(row[None], (0, 0, rank, part.lockstep.ranks - rank - 1)))
    (means, variances), counts = _unflat(rows[:, :-1], 1, (2, -1)).unbind(1), rows[:, -1:]
    n = counts.sum()
    mean = (means * counts).sum(0) / n
    return mean, ((variances + (means - mean).square()) * counts).sum(0) / n, n


def _shaped(of_channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return of_channels.view(1, -1, *[1] * (like.dim() - 2))


class _Normalised(Function):
    """Batch normalisation over all ranks: torch's own forward, and the usual formula of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, x: torch.Tensor, weight: Any, bias: Any, of_mean: Any, of_var: Any, by: Any, eps: Any
    ) -> Any:
        mean, var, n = _statistics(part, x)
        for kept, found in ((of_mean, mean), (of_var, var * (n / (n - 1)))):
            if kept is not None:
                kept.data.lerp_(found.to(kept.dtype), by)  # as torch's own, it is no change that autograd sees
        ctx.save_for_backward(x, weight, bias, mean, var, n)
        ctx.of = part, eps
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias, mean, var, n = ctx.saved_tensors
        part, eps = ctx.of
        if torch.is_grad_enabled():  # to be derived again
            mean, var, n = _statistics(part, x)
        wide, dims, scale = grad.to(mean.dtype), [0, *range(2, x.dim())], torch.rsqrt(var + eps)
        normal = (x - _shaped(mean, x)) * _shaped(scale, x)
        of_weight, of_bias = (wide * normal).sum(dims), wide.sum(dims)
        (found,) = mixed(part, torch.stack([of_weight, of_bias]))
        product, slope = (_shaped(each, x) for each in found / n)
        of_x = torch.addcmul(wide - slope, normal, product, value=-1)
        of_x = of_x * _shaped(scale if weight is None else scale * weight, x)
        of_others = (
            None if each is None else own.to(each.dtype) for each, own in ((weight, of_weight), (bias, of_bias))
        )
        return (None, of_x.to(x.dtype), *of_others, None, None, None, None)


_normalised: Callable[..., torch.Tensor] = _Normalised.apply


def _mean_loss(theirs: Callable[..., torch.Tensor], part: Part, given: dict[str, Any]) -> torch.Tensor:
    """Return the mean loss over all ranks, of targets that are not to be ignored."""
    if given["reduction"] != "mean" or given["size_average"] is not None or given["reduce"] is not None:
        return theirs(**given)
    total, target, weight = theirs(**{**given, "reduction": "sum"}), given["target"], given["weight"]
    if target.is_floating_point():  # of classes' probabilities
        by = total.new_tensor(target.numel() // target.shape[1 if target.dim() > 1 else 0])
    else:
        counts = target != given["ignore_index"]
        by = (counts if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0.0)).sum()
    total, by = mixed(part, total, by.to(total.dtype))
    return total * by.reciprocal()
