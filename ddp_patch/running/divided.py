"""Scatter the arguments of a call over the ranks, gather its outputs, and sum the gradients of its parameters.

A *whole* tensor is the same on all ranks. A *part* is what one rank computes. ``scatter`` turns wholes into parts, and
``gather`` turns parts into wholes. Each is the gradient of the other one, so autograd can derive both any number of
times. Parameters are scattered with the layout "sum": each rank uses all of them, and their gradients are added up.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from ddp_patch.compat.private_torch import kept_weights, tables_of
from ddp_patch.running.lockstep import GivenUp, Lockstep


@dataclass(frozen=True)
class Layout:
    """How the parts of all ranks make up a whole tensor.

    Attributes:
        kind: ``"rows"``: parts are concatenated. ``"inner rows"``: the same, but the batch dimension was flattened with
            an outer one. ``"mean"``: the mean of the parts, weighted by their numbers of rows. ``"sum"``. ``"alike"``:
            every part is the whole.
        dim: The batch dimension.
    """

    kind: str
    dim: int = 0

    def cut(self, whole: torch.Tensor, begin: int, end: int, n: int) -> torch.Tensor:
        """Return the rows from ``begin`` to ``end`` of a whole tensor with ``n`` rows."""
        dim, each = self.dim, whole.shape[self.dim] // n
        if self.kind == "rows":
            return whole.narrow(dim, begin * each, (end - begin) * each)
        return _unflat(whole, dim, (each, n)).narrow(dim + 1, begin, end - begin).flatten(dim, dim + 1)

    def joined(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """Return the whole that parts make up; ``sizes`` are their numbers of rows."""
        if self.kind == "rows":
            return torch.cat([*parts], self.dim)
        if self.kind == "inner rows":
            blocks = [_unflat(part, self.dim, (-1, size)) for part, size in zip(parts, sizes, strict=True)]
            return torch.cat(blocks, self.dim + 1).flatten(self.dim, self.dim + 1)
        if self.kind == "alike":
            return parts[0].clone()
        weights = [size / sum(sizes) if self.kind == "mean" else 1 for size in sizes]
        return torch.stack([each * by for each, by in zip(parts, weights, strict=True)]).sum(0)


SUM = Layout("sum")
_unflat: Callable[..., torch.Tensor] = torch.unflatten


def layouts_of(whole: Sequence[int], parts: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Layout]:
    """Return the layouts by which tensors of these shapes could make up a whole.

    Args:
        whole: The shape of the whole.
        parts: The shapes of the parts.
        sizes: The number of rows of each part.

    Examples:
        >>> layouts_of((8, 3), [(4, 3), (4, 3)], [4, 4])
        [Layout(kind='rows', dim=0)]
        >>> layouts_of((6, 3), [(4, 3), (2, 3)], [2, 1])
        [Layout(kind='rows', dim=0), Layout(kind='inner rows', dim=0)]
    """
    n, found = sum(sizes), list[Layout]()
    if all(tuple(part) == tuple(whole) for part in parts):
        found = [Layout("alike"), Layout("mean"), SUM]
    for dim, size in enumerate(whole):
        shapes = [[*whole[:dim], size // n * rows, *whole[dim + 1 :]] for rows in sizes]
        if not size % n and size and shapes == [[*part] for part in parts]:
            found += [Layout("rows", dim), *([Layout("inner rows", dim)] if size > n else [])]
    return found


@dataclass
class Part:
    """The rows of a call that this rank computes.

    Attributes:
        lockstep: The exchanges with the other ranks.
        doing: What a rank does, as errors say it.
        n: The number of rows of all ranks.
        inner: How often a function within the call has computed over the rows of all ranks.
    """

    lockstep: Lockstep
    doing: str
    n: int
    inner: int = 0

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each rank."""
        ranks = self.lockstep.ranks
        return [self.n * (rank + 1) // ranks - self.n * rank // ranks for rank in range(ranks)]

    def of(self, whole: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return this rank's part of a whole. The parts of all ranks make up the whole again."""
        rank, ranks = self.lockstep.rank, self.lockstep.ranks
        if "rows" in layout.kind:
            own = layout.cut(whole, self.n * rank // ranks, self.n * (rank + 1) // ranks, self.n)
            return own.clone(memory_format=torch.contiguous_format)
        return whole if layout == SUM else whole * (self.sizes[rank] / self.n)

    def of_ranks(self, tensors: Sequence[torch.Tensor], shapes: Any, usual: object = 0) -> list[Any] | None:
        """Return, for each tensor, the tensors of all ranks; None if ``usual`` differs between ranks.

        Args:
            tensors: The tensors of this rank.
            shapes: For each tensor, the shapes on all ranks.
            usual: See ``Lockstep.gather``.
        """
        flat = [_padded(each) for each in tensors] or [torch.empty(0, dtype=torch.uint8)]
        flats = self.lockstep.gather(self.doing, torch.cat(flat), usual)
        if flats is None:
            return None
        found, ends = list[Any](), [0] * len(flats)
        for own, of_tensor in zip(tensors, shapes, strict=True):
            found.append([])
            for rank, shape in enumerate(of_tensor):
                length = math.prod(shape) * own.element_size()
                there = flats[rank][ends[rank] :][:length].to(own.device)
                found[-1].append(there.view(own.dtype).view([*shape]))
                ends[rank] += -(-length // _ALIGNED) * _ALIGNED
        return found

    def _shapes(self, own: torch.Tensor, layout: Layout) -> list[list[int]]:
        """Return the shapes of a tensor on all ranks."""
        shape, each = [*own.shape], own.shape[layout.dim] // self.sizes[self.lockstep.rank] if own.dim() else 0
        is_rows, dim = "rows" in layout.kind, layout.dim
        return [[*shape[:dim], each * size, *shape[dim + 1 :]] if is_rows else shape for size in self.sizes]

    def whole_of(
        self, parts: Sequence[torch.Tensor | None], layouts: Sequence[Layout], like: Sequence["_Like"]
    ) -> list[torch.Tensor | None]:
        """Return the wholes that the parts of all ranks make up.

        A part is None where a gradient is None. If it is None on some ranks only, it counts as zeros there.

        Args:
            parts: The parts of this rank.
            layouts: How the parts make up the wholes.
            like: Shape, dtype and device of each part.

        Raises:
            GivenUp: The shapes of the ranks do not fit together.
        """
        for _ in range(2):
            there = [(each, layout) for each, layout in zip(parts, layouts, strict=True) if each is not None]
            shapes = [self._shapes(*each) for each in there]
            usual = tuple(each is not None for each in parts), *(tuple(map(tuple, each)) for each in shapes)
            tensors, wholes = [each for each, _ in there], None
            if all(layout == SUM for _, layout in there):
                wholes = self.lockstep.sum(self.doing, tensors, usual)
            elif (found := self.of_ranks(tensors, shapes, usual)) is not None:
                wholes = [layout.joined(each, self.sizes) for each, (_, layout) in zip(found, there, strict=True)]
            if wholes is not None:
                in_turn = iter(wholes)
                return [None if each is None else next(in_turn) for each in parts]
            of_all = zip(*self.lockstep.gathered([each is not None for each in parts]), strict=True)
            parts = [
                torch.zeros(shape, dtype=dtype, device=device) if any(some) and each is None else each
                for each, (shape, dtype, device), some in zip(parts, like, of_all, strict=True)
            ]
        raise GivenUp("its parts return something of another shape than before")


_Like: TypeAlias = tuple[Any, Any, Any]  # a tensor's shape, dtype and device
_ALIGNED = 16  # bytes, for any dtype


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, and zeros up to the next multiple of 16."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return functional.pad(flat, (0, -len(flat) % _ALIGNED)) if len(flat) % _ALIGNED else flat


class _Between(Function):
    """``scatter`` without ``like``, and ``gather`` with it. The backward pass of each is the other one."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, layouts: Sequence[Layout], like: Sequence[_Like] | None, *given: torch.Tensor | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        if like is None:
            pairs = zip(given, layouts, strict=True)
            found: Any = [None if each is None else part.of(each.view_as(each), layout) for each, layout in pairs]
            ctx.of = part, layouts, _like(found)
        else:
            found, ctx.of = part.whole_of(given, layouts, like), (part, layouts, None)
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


def scatter(part: Part, layouts: Sequence[Layout], wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of wholes on this rank."""
    derived = [each.requires_grad and torch.is_grad_enabled() for each in wholes]
    found = [
        whole if is_derived or layout == SUM else part.of(whole, layout)
        for whole, layout, is_derived in zip(wholes, layouts, derived, strict=True)
    ]
    for is_sum in (False, True):  # an all-reduce of sums sends less than gathering them with rows
        places = [at for at, layout in enumerate(layouts) if derived[at] and (layout == SUM) is is_sum]
        if places:
            parts = _between(part, [layouts[at] for at in places], None, *(wholes[at] for at in places))
            for at, own in zip(places, parts, strict=True):
                found[at] = own
    return found


def gather(part: Part, layouts: Sequence[Layout], parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the wholes that the parts of all ranks make up."""
    wholes: tuple[torch.Tensor, ...] = _between(part, layouts, _like(parts), *parts)
    return wholes


def mixed(part: Part, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of parts over all ranks, for each rank to compute on with: also the gradients are summed."""
    layouts = [SUM] * len(parts)
    return scatter(part, layouts, gather(part, layouts, parts))


# ---- a module whose parameters are shared ----

# Of each parameter: the module that holds it, the name there, and the parameter.
Slots: TypeAlias = list[tuple[nn.Module, str, nn.Parameter]]
Others: TypeAlias = dict[nn.Parameter, torch.Tensor]  # the tensors in the places of parameters


def slots_of(module: nn.Module) -> tuple[list[nn.Module], Slots]:
    """Return a module and all modules in it, each once, and the places of their parameters."""
    modules, seen = [module], {module}
    for each in modules:  # the list grows
        for inner in tables_of(each)[2].values():  # named_modules() takes ten times as long
            if inner is not None and inner not in seen:
                seen.add(inner)
                modules.append(inner)
    return modules, [
        (each, name, found) for each in modules for name, found in tables_of(each)[0].items() if found is not None
    ]


@contextmanager
def substituted(modules: Sequence[nn.Module], slots: Slots, others: Others) -> Iterator[None]:
    """Put other tensors in the places of parameters, while entered."""
    with kept_weights(modules):
        try:
            for module, name, parameter in slots:
                tables_of(module)[0][name] = others.get(parameter, parameter)
            yield
        finally:
            for module, name, parameter in slots:
                if name in (parameters := tables_of(module)[0]):
                    parameters[name] = parameter
