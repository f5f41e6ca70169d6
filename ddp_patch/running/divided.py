"""Divide a call of a module: scatter rows, share parameters, gather rows; each is the other's gradient.

What all ranks have alike is *whole*, what each has for itself is *of a part*. ``scatter`` makes parts of wholes, and
``gather`` wholes of parts; a whole is ``shared`` by all parts, and parts are ``summed`` to a whole. The gradient of
``scatter`` is ``gather``, that of ``shared`` is ``summed``, and the other way round, so all can be derived again.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from ddp_patch.compat.private_torch import kept_weights, tables_of
from ddp_patch.running.lockstep import GivenUp, Lockstep
from ddp_patch.running.trees import mapped

__all__ = [
    "Later",
    "Layout",
    "Part",
    "Slots",
    "cut",
    "gather",
    "layouts_of",
    "mixed",
    "scatter",
    "shared",
    "sizes_of",
    "slots_of",
    "substituted",
    "whole_batch",
]


@dataclass(frozen=True)
class Layout:
    """How parts make up a whole.

    Attributes:
        kind: ``"rows"``, ``"mean"`` (of the parts' tensors, weighed by rows), ``"sum"`` or ``"alike"`` on all ranks.
        dim: In which dimension the rows are.
        is_inner: Whether they are the inner ones of several dimensions that were made one.
    """

    kind: str
    dim: int = 0
    is_inner: bool = False


@dataclass
class Part:
    """Which rows of a call are this rank's, and with whom it exchanges.

    Attributes:
        lockstep: The ranks.
        doing: What errors say that a rank does.
        n: How many rows there are.
        inner: How often something within the call has seen the whole batch.
        late: The sizes of what is gathered when it is read.
    """

    lockstep: Lockstep
    doing: str
    n: int
    inner: int = 0
    late: tuple[int, ...] = ()

    @property
    def bounds(self) -> list[int]:
        """Where each rank's rows begin; and the end."""
        ranks = self.lockstep.ranks
        return [self.n * rank // ranks for rank in range(ranks + 1)]

    @property
    def sizes(self) -> list[int]:
        """How many rows each rank has."""
        return [end - begin for begin, end in pairwise(self.bounds)]


_unflat: Callable[..., torch.Tensor] = torch.unflatten


def cut(whole: torch.Tensor, layout: Layout, begin: int, end: int, n: int) -> torch.Tensor:
    """Return some rows of a whole tensor, which has so many."""
    dim, each = layout.dim, whole.shape[layout.dim] // n
    if layout.is_inner:
        return _unflat(whole, dim, (each, n)).narrow(dim + 1, begin, end - begin).flatten(dim, dim + 1)
    return whole.narrow(dim, begin * each, (end - begin) * each)


def _joined(parts: Sequence[torch.Tensor], layout: Layout, sizes: Sequence[int]) -> torch.Tensor:
    """Return the whole tensor, of parts that have so many rows."""
    dim = layout.dim
    if layout.is_inner:
        blocks = [_unflat(part, dim, (-1, size)) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)
    return torch.cat([*parts], dim)


def layouts_of(whole: Sequence[int], part: Sequence[int], n: int, rows: int) -> list[Layout]:
    """Return in which ways a tensor of some shape may be the part, of so many rows, of a whole of some shape.

    Examples:
        >>> layouts_of((8, 3), (4, 3), 8, 4)
        [Layout(kind='rows', dim=0, is_inner=False)]
        >>> layouts_of((16, 3), (8, 3), 8, 4)
        [Layout(kind='rows', dim=0, is_inner=False), Layout(kind='rows', dim=0, is_inner=True)]
    """
    if tuple(whole) == tuple(part):
        return [Layout("alike"), Layout("mean"), Layout("sum")]
    if len(whole) != len(part):
        return []
    differ = [dim for dim, sizes in enumerate(zip(whole, part, strict=True)) if sizes[0] != sizes[1]]
    dim = differ[0]
    if len(differ) > 1 or whole[dim] % n or whole[dim] // n * rows != part[dim]:
        return []
    return [Layout("rows", dim), *([Layout("rows", dim, is_inner=True)] if whole[dim] > n else [])]


# ---- between wholes and parts ----


def _of_part(whole: torch.Tensor, layout: Layout, part: Part) -> torch.Tensor:
    """Return what this rank takes of a whole tensor, so that all ranks' make up the whole."""
    begin, end = part.bounds[part.lockstep.rank :][:2]
    if layout.kind == "rows":
        return cut(whole, layout, begin, end, part.n).clone(memory_format=torch.contiguous_format)
    return whole.clone() if layout.kind == "sum" else whole * ((end - begin) / part.n)


def sizes_of(tensor: torch.Tensor, layout: Layout, rows: int) -> list[int]:
    """Return the shape of a part that has so many rows, for one row."""
    shape = [*tensor.shape]
    if layout.kind == "rows":
        shape[layout.dim] //= rows
    return shape


def _of_all(parts: Sequence[torch.Tensor], layouts: Sequence[Layout], part: Part) -> list[torch.Tensor]:
    """Return the wholes that all ranks' parts make up.

    Raises:
        GivenUp: Other ranks have other shapes, so that they make up none.
    """
    rank, sizes = part.lockstep.rank, part.sizes
    shapes = [sizes_of(each, layout, sizes[rank]) for each, layout in zip(parts, layouts, strict=True)]
    sent = [at for at, layout in enumerate(layouts) if layout.kind != "alike" or _is_derived(parts[at])]
    pieces = [_padded(parts[at]) for at in sent]
    flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    usual = (*part.late, *(number for shape in shapes for number in (len(shape), *shape)))
    flats = part.lockstep.gather(part.doing, flat, usual)
    if flats is None:
        raise GivenUp
    wholes = [each.clone() for each in parts]
    ends = [0] * len(flats)
    for at in sent:
        own, layout, found = parts[at], layouts[at], []
        for other, size in enumerate(sizes):
            shape = [*own.shape]
            if layout.kind == "rows":
                shape[layout.dim] = shapes[at][layout.dim] * size
            length = math.prod(shape) * own.element_size()
            found.append(flats[other][ends[other] :][:length].view(own.dtype).view(shape).to(own.device))
            ends[other] += -(-length // _ALIGNED) * _ALIGNED
        if layout.kind == "rows":
            wholes[at] = _joined(found, layout, sizes)
        else:
            weights = [1.0] * len(sizes) if layout.kind == "sum" else [size / part.n for size in sizes]
            first, *others = [
                each if weight == 1 else each * weight for each, weight in zip(found, weights, strict=True)
            ]
            wholes[at] = sum(others, first.clone())
    return wholes


_ALIGNED = 16  # bytes, for any dtype


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return functional.pad(flat, (0, -len(flat) % _ALIGNED)) if len(flat) % _ALIGNED else flat


def _is_derived(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _agreed(part: Part, mask: Sequence[bool]) -> list[bool]:
    """Return what is there on some rank."""
    if part.lockstep.meet(part.doing, tuple(mask)):
        return [*mask]
    return [any(each) for each in zip(*part.lockstep.gathered([*mask]), strict=True)]


def _present(tensors: Sequence[torch.Tensor | None]) -> tuple[list[int], list[torch.Tensor]]:
    """Return the places of the tensors that are there, and these."""
    found = [(at, tensor) for at, tensor in enumerate(tensors) if tensor is not None]
    return [at for at, _ in found], [tensor for _, tensor in found]


def _spread(places: Sequence[int], tensors: Sequence[torch.Tensor], n: int) -> tuple[torch.Tensor | None, ...]:
    """Return tensors at their places among so many."""
    found = dict(zip(places, tensors, strict=True))
    return tuple(found.get(at) for at in range(n))


class _Scatter(Function):
    """Wholes to parts."""

    @staticmethod
    def forward(ctx: Any, part: Part, layouts: Sequence[Layout], *wholes: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        parts = tuple(_of_part(whole, layout, part) for whole, layout in zip(wholes, layouts, strict=True))
        ctx.of = part, layouts, [(each.shape, each.dtype, each.device) for each in parts]
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        part, layouts, like = ctx.of
        places = [at for at, is_there in enumerate(_agreed(part, [each is not None for each in grads])) if is_there]
        filled = (_zeros(*like[at]) if (grad := grads[at]) is None else grad for at in places)
        gathered = gather(part, [layouts[at] for at in places], *filled) if places else ()
        return (None, None, *_spread(places, gathered, len(grads)))


class _Gather(Function):
    """Parts to wholes."""

    @staticmethod
    def forward(ctx: Any, part: Part, layouts: Sequence[Layout], *parts: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.of = part, layouts
        wholes = _of_all(parts, layouts, part)
        ctx.mark_non_differentiable(*(each for at, each in enumerate(wholes) if not ctx.needs_input_grad[2 + at]))
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        part, layouts = ctx.of
        places, present = _present(grads)
        scattered = scatter(part, [layouts[at] for at in places], *present) if places else ()
        return (None, None, *_spread(places, scattered, len(grads)))


class _Shared(Function):
    """A whole, as each part uses it."""

    @staticmethod
    def forward(ctx: Any, part: Part, *wholes: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.of = part, wholes
        return tuple(whole.view_as(whole) for whole in wholes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, *_summed(*ctx.of, *grads))


class _Summed(Function):
    """The sum of what parts have, as a whole; of those that some rank has."""

    @staticmethod
    def forward(ctx: Any, part: Part, like: Sequence[torch.Tensor], *parts: torch.Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.of = part, [each is not None for each in parts]
        places, present = _present(parts)
        sums = part.lockstep.sum(part.doing, present, tuple(ctx.of[1]))
        if sums is None:
            places = [at for at, is_there in enumerate(_agreed(*ctx.of)) if is_there]
            filled = (torch.zeros_like(like[at]) if (each := parts[at]) is None else each for at in places)
            sums = part.lockstep.sum(part.doing, [*filled]) or []
        return _spread(places, sums, len(parts))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        part, mask = ctx.of
        places, present = _present(grads)
        found = _spread(places, shared(part, *present) if places else (), len(grads))
        return (None, None, *(each if is_there else None for each, is_there in zip(found, mask, strict=True)))


def mixed(part: Part, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return sums over all parts, for each part to go on with."""
    sums: tuple[torch.Tensor, ...] = shared(part, *_summed(part, parts, *parts))
    return sums


scatter: Callable[..., tuple[torch.Tensor, ...]] = _Scatter.apply
gather: Callable[..., tuple[torch.Tensor, ...]] = _Gather.apply
shared: Callable[..., tuple[torch.Tensor, ...]] = _Shared.apply
_summed: Callable[..., tuple[torch.Tensor, ...]] = _Summed.apply


class Later(torch.Tensor):
    """A whole tensor that is gathered when it is first read; on all ranks, as they run the same script."""

    @staticmethod
    def of(part: Part, layout: Layout, own: torch.Tensor) -> "Later":
        """Return the whole tensor of which this rank has a part."""
        shape = sizes_of(own, layout, part.sizes[part.lockstep.rank])
        shape[layout.dim] *= part.n
        made = torch.empty(shape, dtype=own.dtype, device="meta").as_subclass(Later)
        vars(made).update(part=part, layout=layout, own=own, whole=None)
        return made

    def made(self) -> torch.Tensor:
        """Return the tensor."""
        held = vars(self)
        if held["whole"] is None:
            with torch.enable_grad():
                (held["whole"],) = gather(held["part"], [held["layout"]], held["own"])
            held["own"] = None
        whole: torch.Tensor = held["whole"]
        return whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_SHAPES:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        args, kwargs = mapped((args, kwargs or {}), lambda each: each.made() if isinstance(each, Later) else each)
        return func(*args, **kwargs)


_OF_SHAPES = {torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.__len__}  # type: ignore[attr-defined]  # a property


# ---- a module whose parameters are shared ----

# The module that holds it, its name there, and the parameter.
Slots: TypeAlias = list[tuple[nn.Module, str, nn.Parameter]]


def slots_of(module: nn.Module) -> tuple[list[nn.Module], Slots]:
    """Return a module and all in it, each once, and where their parameters are."""
    modules, seen = [module], {module}
    for each in modules:  # which grows
        for inner in tables_of(each)[2].values():  # named_modules() takes ten times as long
            if inner is not None and inner not in seen:
                seen.add(inner)
                modules.append(inner)
    return modules, [
        (each, name, found) for each in modules for name, found in tables_of(each)[0].items() if found is not None
    ]


@contextmanager
def substituted(modules: Sequence[nn.Module], slots: Slots, others: dict[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Let modules have other tensors in the place of parameters, while entered."""
    with kept_weights(modules):
        try:
            for module, name, parameter in slots:
                tables_of(module)[0][name] = others.get(parameter, parameter)
            yield
        finally:
            for module, name, parameter in slots:
                if name in (parameters := tables_of(module)[0]):
                    parameters[name] = parameter


# ---- what sees the whole batch within a module ----

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
        def of_part(part: Part, *args: Any, **options: Any) -> Any:
            part.inner += 1
            return ours(theirs, part, *args, **options)

        def call(*args: Any, **options: Any) -> Any:
            part = part_now()
            return theirs(*args, **options) if part is None else of_part(part, *args, **options)

        stack.enter_context(patch.object(functional, name, wraps(theirs)(call)))

    put("batch_norm", _batch_norm)
    put("cross_entropy", _cross_entropy)
    put("nll_loss", _nll_loss)


def _batch_norm(
    theirs: Callable[..., torch.Tensor],
    part: Part,
    input: torch.Tensor,  # noqa: A002 - as torch names it
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not training:
        return theirs(input, running_mean, running_var, weight, bias, training, momentum, eps)
    running = [] if running_mean is None or running_var is None else [running_mean, running_var]
    return _normalised(part, input, weight, bias, running, momentum, eps)


def _shaped(of_channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return of_channels.view(1, -1, *[1] * (like.dim() - 2))


def _statistics(part: Part, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean and variance of each channel of the whole batch, and of how many numbers they are."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    n = x.new_full((1,), x.numel() // x.shape[1])
    own_var, own_mean = torch.var_mean(x, dims, correction=0)
    (sums,) = mixed(part, torch.cat([n, own_mean * n]))
    mean = sums[1:] / sums[:1]
    (squares,) = mixed(part, (own_var + (own_mean - mean).square()) * n)
    return mean, squares / sums[:1], sums[:1]


class _Normalised(Function):
    """Batch normalisation by the whole batch: torch's own operations, but for the sums."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, x: torch.Tensor, weight: Any, bias: Any, running: Any, momentum: Any, eps: Any
    ) -> Any:
        mean, var, n = _statistics(part, x.float() if x.dtype in {torch.float16, torch.bfloat16} else x)
        for kept, found in zip(running, (mean, var * (n / (n - 1))), strict=False):
            kept.data.lerp_(found.to(kept.dtype), momentum)  # as torch's own, it is no change that autograd sees
        ctx.save_for_backward(x, weight, bias, mean, torch.rsqrt(var + eps), n)
        ctx.of = part, eps
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias, mean, scale, n = ctx.saved_tensors
        part, eps = ctx.of
        if torch.is_grad_enabled():  # to be derived again
            return (None, *_derived_again(part, x, weight, bias, eps, grad), None, None, None)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = grad.to(mean.dtype)
        normal = (x - _shaped(mean, x)) * _shaped(scale, x)
        slopes = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
        (sums,) = part.lockstep.sum(part.doing, [slopes]) or [slopes]
        mean_slope, mean_product = (sums / n).unbind()
        inner = normal.mul_(_shaped(mean_product, x)).add_(_shaped(mean_slope, x)).neg_().add_(wide)
        of_x = inner.mul_(_shaped(scale if weight is None else scale * weight, x)).to(x.dtype)
        of_others = (
            None if to is None else of.to(to.dtype) for of, to in zip(slopes.flip(0), (weight, bias), strict=True)
        )
        return (None, of_x, *of_others, None, None, None)


_normalised: Callable[..., torch.Tensor] = _Normalised.apply


def _derived_again(
    part: Part, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, grad: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients of batch normalisation, by operations that can be derived."""
    mean, var, _ = _statistics(part, x.to(grad.dtype))
    result = (x - _shaped(mean, x)) * _shaped(torch.rsqrt(var + eps), x)
    result = result if weight is None else result * _shaped(weight, x)
    result = result if bias is None else result + _shaped(bias, x)
    given = [each for each in (x, weight, bias) if each is not None and each.requires_grad]
    slopes = iter(torch.autograd.grad(result, given, grad, create_graph=True))
    return [next(slopes) if each is not None and each.requires_grad else None for each in (x, weight, bias)]


def _ratio(part: Part, total: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean of the whole batch: a sum by a sum of weights."""
    total, by = mixed(part, total, weights.to(total.dtype))
    return total * by.reciprocal()


def _cross_entropy(
    theirs: Callable[..., torch.Tensor],
    part: Part,
    input: torch.Tensor,  # noqa: A002 - as torch names it
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    if reduction != "mean" or size_average is not None or reduce is not None:
        options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        return theirs(input, target, *options)
    total = theirs(input, target, weight, None, ignore_index, None, "sum", label_smoothing)
    if target.is_floating_point():
        return _ratio(part, total, total.new_tensor(target.numel() // target.shape[1 if target.dim() > 1 else 0]))
    return _ratio(part, total, _weights(target, weight, ignore_index))


def _nll_loss(
    theirs: Callable[..., torch.Tensor],
    part: Part,
    input: torch.Tensor,  # noqa: A002 - as torch names it
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    if reduction != "mean" or size_average is not None or reduce is not None:
        return theirs(input, target, weight, size_average, ignore_index, reduce, reduction)
    total = theirs(input, target, weight, None, ignore_index, None, "sum")
    return _ratio(part, total, _weights(target, weight, ignore_index))


def _weights(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Return the sum of the weights of targets that count."""
    counts = target != ignore_index
    return counts.sum() if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0.0).sum()
