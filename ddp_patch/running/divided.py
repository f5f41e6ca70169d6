"""Divide a call of a module: scatter rows, share parameters, gather rows; each is the other's gradient.

What all ranks have alike is *whole*, what each has for itself is *of a part*. ``scatter`` makes parts of wholes, and
``gather`` wholes of parts; the gradient of each is the other one, so all can be derived again. What parts make up may
be a sum: then a part of the whole is all of it, which is ``shared``, as parameters are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
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
_Like: TypeAlias = tuple[Any, Any, Any]  # a tensor's shape, dtype and device


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


def sizes_of(tensor: torch.Tensor, layout: Layout, rows: int) -> list[int]:
    """Return the shape of a part that has so many rows, for one row."""
    shape = [*tensor.shape]
    if layout.kind == "rows":
        shape[layout.dim] //= rows
    return shape


def _of_part(whole: torch.Tensor | None, layout: Layout, part: Part) -> torch.Tensor | None:
    """Return what this rank takes of a whole tensor, so that all ranks' make up the whole."""
    begin, end = part.bounds[part.lockstep.rank :][:2]
    if whole is None or layout.kind == "sum":
        return whole if whole is None else whole.view_as(whole)
    if layout.kind == "rows":
        return cut(whole, layout, begin, end, part.n).clone(memory_format=torch.contiguous_format)
    return whole * ((end - begin) / part.n)


def _of_all(
    parts: Sequence[torch.Tensor | None], layouts: Sequence[Layout], like: Sequence[_Like], part: Part
) -> list[torch.Tensor | None]:
    """Return the wholes that all ranks' parts make up: of those that some rank has, as its gradient may have none.

    Raises:
        GivenUp: Other ranks have other shapes, so that they make up none.
    """
    are_there = [each is not None for each in parts]
    found = _exchanged(parts, layouts, part)
    if found is None:
        of_ranks = part.lockstep.gathered(are_there)
        if all(each == are_there for each in of_ranks):
            raise GivenUp
        filled = [
            torch.zeros(shape, dtype=dtype, device=device) if any(some) and each is None else each
            for each, (shape, dtype, device), some in zip(parts, like, zip(*of_ranks, strict=True), strict=True)
        ]
        found = _exchanged(filled, layouts, part)
    if found is None:
        raise GivenUp
    return found


def _exchanged(
    parts: Sequence[torch.Tensor | None], layouts: Sequence[Layout], part: Part
) -> list[torch.Tensor | None] | None:
    """Return the wholes of parts that are there; None if other ranks have others."""
    there = [(at, each) for at, each in enumerate(parts) if each is not None]
    places, given, kinds = [at for at, _ in there], [each for _, each in there], [layouts[at] for at, _ in there]
    rows = part.sizes[part.lockstep.rank]
    shapes = [sizes_of(each, layout, rows) for each, layout in zip(given, kinds, strict=True)]
    usual = (*places, *part.late, *(number for shape in shapes for number in (len(shape), *shape)))
    if all(layout.kind == "sum" for layout in kinds):
        wholes = part.lockstep.sum(part.doing, given, usual)
    else:
        wholes = _of_bytes(given, kinds, part, usual)
    if wholes is None:
        return None
    found = dict(zip(places, wholes, strict=True))
    return [found.get(at) for at in range(len(parts))]


def _of_bytes(
    parts: Sequence[torch.Tensor], layouts: Sequence[Layout], part: Part, usual: object
) -> list[torch.Tensor] | None:
    """Return the wholes of parts of several kinds, whose bytes are sent together; None if ``usual`` is not alike."""
    wholes = [each.clone() for each in parts]
    sent = [at for at, each in enumerate(parts) if layouts[at].kind != "alike" or _is_derived(each)]
    flat = torch.cat([_padded(parts[at]) for at in sent] or [torch.empty(0, dtype=torch.uint8)])
    flats = part.lockstep.gather(part.doing, flat, usual)
    if flats is None:
        return None
    sizes, ends = part.sizes, [0] * len(flats)
    for at in sent:
        own, layout, found = parts[at], layouts[at], list[torch.Tensor]()
        for other, size in enumerate(sizes):
            shape = sizes_of(own, layout, sizes[part.lockstep.rank])
            if layout.kind == "rows":
                shape[layout.dim] *= size
            length = math.prod(shape) * own.element_size()
            found.append(flats[other][ends[other] :][:length].view(own.dtype).view(shape).to(own.device))
            ends[other] += -(-length // _ALIGNED) * _ALIGNED
        if layout.kind == "rows":
            wholes[at] = _joined(found, layout, sizes)
        else:
            weights = [1.0 if layout.kind == "sum" else size / part.n for size in sizes]
            first, *others = [each if by == 1 else each * by for each, by in zip(found, weights, strict=True)]
            wholes[at] = sum(others, first.clone())
    return wholes


_ALIGNED = 16  # bytes, for any dtype


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return functional.pad(flat, (0, -len(flat) % _ALIGNED)) if len(flat) % _ALIGNED else flat


def _is_derived(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Between(Function):
    """Wholes to parts, or parts to wholes: the gradient of each is the other one, so it can be derived again."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, layouts: Sequence[Layout], like: Sequence[_Like] | None, *given: torch.Tensor | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        if like is None:
            found = [_of_part(whole, layout, part) for whole, layout in zip(given, layouts, strict=True)]
            ctx.of = part, layouts, _like(found)
        else:
            found, ctx.of = _of_all(given, layouts, like, part), (part, layouts, None)
        needed = zip(found, ctx.needs_input_grad[3:], strict=True)
        ctx.mark_non_differentiable(*(each for each, is_needed in needed if each is not None and not is_needed))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        found = zip(_between(*ctx.of, *grads), ctx.needs_input_grad[3:], strict=True)
        return (None, None, None, *(each if is_needed else None for each, is_needed in found))


_between: Callable[..., Any] = _Between.apply


def _like(tensors: Sequence[torch.Tensor | None]) -> list[_Like]:
    return [(each.shape, each.dtype, each.device) if each is not None else ((), None, None) for each in tensors]


def scatter(part: Part, layouts: Sequence[Layout], *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return this rank's parts of wholes."""
    parts: tuple[torch.Tensor, ...] = _between(part, layouts, None, *wholes)
    return parts


def gather(part: Part, layouts: Sequence[Layout], *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the wholes of all ranks' parts."""
    wholes: tuple[torch.Tensor, ...] = _between(part, layouts, _like(parts), *parts)
    return wholes


_SUM = Layout("sum")


def shared(part: Part, *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return wholes as each part uses them: their gradients are the sums over all parts."""
    return scatter(part, [_SUM] * len(wholes), *wholes)


def mixed(part: Part, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return sums over all parts, for each part to go on with."""
    return shared(part, *gather(part, [_SUM] * len(parts), *parts))


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
    put("cross_entropy", _mean_loss)
    put("nll_loss", _mean_loss)


def _given(theirs: Callable[..., torch.Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a function, by name."""
    bound = signature(theirs).bind(*args, **options)
    bound.apply_defaults()
    return bound.arguments


def _batch_norm(theirs: Callable[..., torch.Tensor], part: Part, *args: Any, **options: Any) -> torch.Tensor:
    given = _given(theirs, args, options)
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    return _normalised(part, *map(given.get, names)) if given["training"] else theirs(*args, **options)


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
        (sums,) = part.lockstep.sum(part.doing, [sums_of]) or [sums_of]
        mean_product, mean_slope = (_shaped(each, x) for each in sums / n)
        inner = normal.mul_(mean_product).add_(mean_slope).neg_().add_(wide)
        of_x = inner.mul_(_shaped(scale if weight is None else scale * weight, x)).to(x.dtype)
        of_others = (
            None if each is None else slope.to(each.dtype) for each, slope in zip((weight, bias), sums_of, strict=True)
        )
        return (None, of_x, *of_others, None, None, None, None)


_normalised: Callable[..., torch.Tensor] = _Normalised.apply


def _mean_loss(theirs: Callable[..., torch.Tensor], part: Part, *args: Any, **options: Any) -> torch.Tensor:
    given = _given(theirs, args, options)
    if given["reduction"] != "mean" or given["size_average"] is not None or given["reduce"] is not None:
        return theirs(*args, **options)
    total, by = _sums(theirs, given)
    total, by = mixed(part, total, by)
    return total * by.reciprocal()


def _sums(theirs: Callable[..., torch.Tensor], given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two sums whose ratio a mean is: of losses, and of the weights of what counts."""
    total, target, weight = theirs(**{**given, "reduction": "sum"}), given["target"], given["weight"]
    if target.is_floating_point():  # of classes' probabilities
        return total, total.new_tensor(target.numel() // target.shape[1 if target.dim() > 1 else 0])
    counts = target != given["ignore_index"]
    by = counts if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0.0)
    return total, by.sum().to(total.dtype)
