"""Divide a call of a module: scatter rows, share parameters, gather rows; each is the other's gradient.

What all ranks have alike is *whole*, what each has for itself is *of a part*. ``scatter`` makes parts of wholes, and
``gather`` wholes of parts; the gradient of each is the other one, so all can be derived again. What parts make up may
be a sum: then a part of the whole is all of it, which is ``shared``, as parameters are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from ddp_patch.compat.private_torch import kept_weights, no_torch_function, tables_of, tensor_without_numbers
from ddp_patch.running.lockstep import GivenUp, Lockstep
from ddp_patch.running.trees import mapped


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
    """

    lockstep: Lockstep
    doing: str
    n: int
    inner: int = 0

    @property
    def bounds(self) -> list[int]:
        """Where each rank's rows begin; and the end."""
        ranks = self.lockstep.ranks
        return [self.n * rank // ranks for rank in range(ranks + 1)]

    @property
    def sizes(self) -> list[int]:
        """How many rows each rank has."""
        return [end - begin for begin, end in pairwise(self.bounds)]

    def cut(self, whole: torch.Tensor, layout: "Layout") -> torch.Tensor:
        """Return this rank's rows of a whole tensor."""
        begin, end = self.bounds[self.lockstep.rank :][:2]
        return cut(whole, layout, begin, end, self.n)

    def sizes_of(self, own: torch.Tensor, layout: "Layout", rows: int = 1) -> list[int]:
        """Return the shape of a tensor of which this rank has a part, for so many rows."""
        shape = [*own.shape]
        if layout.kind == "rows":
            shape[layout.dim] = shape[layout.dim] // self.sizes[self.lockstep.rank] * rows
        return shape

    def is_large(self, own: torch.Tensor, layout: "Layout") -> bool:
        """Return whether rows are so many bytes that they are gathered when something reads them."""
        n = math.prod(self.sizes_of(own, layout, self.n))
        return layout.kind == "rows" and n * own.element_size() > _LARGE


_LARGE = 2**19
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


def _of_part(whole: torch.Tensor | None, layout: Layout, part: Part) -> torch.Tensor | None:
    """Return what this rank takes of a whole tensor, so that all ranks' make up the whole."""
    if whole is None or layout.kind == "sum":
        return whole if whole is None else whole.view_as(whole)
    if layout.kind == "rows":
        return part.cut(whole, layout).clone(memory_format=torch.contiguous_format)
    return whole * (part.sizes[part.lockstep.rank] / part.n)


def _of_all(
    parts: Sequence[torch.Tensor | None],
    layouts: Sequence[Layout],
    like: Sequence[_Like],
    part: Part,
    late: Sequence[int] = (),
) -> list[torch.Tensor | None]:
    """Return the wholes that all ranks' parts make up: of those that some rank has, as its gradient may have none.

    Raises:
        GivenUp: Other ranks have other shapes, so that they make up none.
    """
    for _ in range(2):
        there = [(at, each, layouts[at]) for at, each in enumerate(parts) if each is not None]
        shapes = [part.sizes_of(each, layout) for _, each, layout in there]
        usual = (*(at for at, _, _ in there), *(number for shape in shapes for number in (len(shape), *shape)))
        if all(layout.kind == "sum" for _, _, layout in there):
            wholes = part.lockstep.sum(part.doing, [each for _, each, _ in there], usual)
        else:
            wholes = _of_bytes([(each, layout, at in late) for at, each, layout in there], part, usual)
        if wholes is not None:
            found = {at: whole for (at, _, _), whole in zip(there, wholes, strict=True)}
            return [found.get(at) for at in range(len(parts))]
        of_ranks = zip(*part.lockstep.gathered([each is not None for each in parts]), strict=True)
        parts = [
            torch.zeros(shape, dtype=dtype, device=device) if any(some) and each is None else each
            for each, (shape, dtype, device), some in zip(parts, like, of_ranks, strict=True)
        ]
    raise GivenUp(_OTHER_SHAPE)


_OTHER_SHAPE = "its parts return something of another shape than before"


def _of_bytes(
    parts: Sequence[tuple[torch.Tensor, Layout, bool]], part: Part, usual: object = 0
) -> list[torch.Tensor] | None:
    """Return the wholes of parts of several kinds, whose bytes are sent together; None if ``usual`` is not alike.

    Those that are late are gathered when somebody reads them.
    """
    sent = [not is_late and (layout.kind != "alike" or _is_derived(own)) for own, layout, is_late in parts]
    flat = [_padded(own) for (own, _, _), is_sent in zip(parts, sent, strict=True) if is_sent]
    flats = part.lockstep.gather(part.doing, torch.cat(flat or [torch.empty(0, dtype=torch.uint8)]), usual)
    if flats is None:
        return None
    wholes, ends = list[torch.Tensor](), [0] * len(flats)
    for (own, layout, is_late), is_sent in zip(parts, sent, strict=True):
        found = list[torch.Tensor]()
        for other, size in enumerate(part.sizes if is_sent else ()):
            shape = part.sizes_of(own, layout, size)
            length = math.prod(shape) * own.element_size()
            found.append(flats[other][ends[other] :][:length].view(own.dtype).view(shape).to(own.device))
            ends[other] += -(-length // _ALIGNED) * _ALIGNED
        if not is_sent:
            wholes.append(Later.of(part, layout, own) if is_late else own.clone())
        elif layout.kind == "rows":
            wholes.append(_joined(found, layout, part.sizes))
        else:
            weights = [1.0 if layout.kind == "sum" else size / part.n for size in part.sizes]
            first, *others = [each if by == 1 else each * by for each, by in zip(found, weights, strict=True)]
            wholes.append(sum(others, first.clone()))
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
        ctx: Any,
        part: Part,
        layouts: Sequence[Layout],
        like: Sequence[_Like] | None,
        late: Sequence[int],
        *given: torch.Tensor | None,
    ) -> Any:
        ctx.set_materialize_grads(False)
        if like is None:
            found = [_of_part(whole, layout, part) for whole, layout in zip(given, layouts, strict=True)]
            ctx.of = part, layouts, _like(found), ()
        else:
            found, ctx.of = _of_all(given, layouts, like, part, late), (part, layouts, None, ())
        needed = zip(found, ctx.needs_input_grad[4:], strict=True)
        ctx.mark_non_differentiable(*(each for each, is_needed in needed if each is not None and not is_needed))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        found = zip(_between(*ctx.of, *grads), ctx.needs_input_grad[4:], strict=True)
        return (None, None, None, None, *(each if is_needed else None for each, is_needed in found))


_between: Callable[..., Any] = _Between.apply


def _like(tensors: Sequence[torch.Tensor | None]) -> list[_Like]:
    return [(each.shape, each.dtype, each.device) if each is not None else ((), None, None) for each in tensors]


def scatter(part: Part, layouts: Sequence[Layout], *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return this rank's parts of wholes."""
    parts: tuple[torch.Tensor, ...] = _between(part, layouts, None, (), *wholes)
    return parts


def gather(
    part: Part, layouts: Sequence[Layout], *parts: torch.Tensor, late: Sequence[int] = ()
) -> tuple[torch.Tensor, ...]:
    """Return the wholes of all ranks' parts; of those at some places, what is gathered when somebody reads it."""
    wholes: tuple[torch.Tensor, ...] = _between(part, layouts, _like(parts), late, *parts)
    return wholes


_SUM = Layout("sum")


def shared(part: Part, *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return wholes as each part uses them: their gradients are the sums over all parts."""
    return scatter(part, [_SUM] * len(wholes), *wholes)


def sums(part: Part, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return sums over all parts."""
    return gather(part, [_SUM] * len(parts), *parts)


def mixed(part: Part, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return sums over all parts, for each part to go on with."""
    return shared(part, *sums(part, *parts))


def _by_reading(name: str) -> Callable[..., Any]:
    """Return a method that is called of the whole tensor."""
    return lambda self, *args, **options: getattr(self.read(), name)(*args, **options)


class Later(torch.Tensor):
    """A whole tensor whose rows are gathered when something first reads it: on all ranks, as they run the same script.

    Autograd sees a tensor as any other: what it records does not ask for the numbers.
    """

    __torch_function__: Any = no_torch_function()
    of_part: tuple[Part, Layout, torch.Tensor]
    _whole: torch.Tensor | None

    @staticmethod
    def of(part: Part, layout: Layout, own: torch.Tensor) -> "Later":
        """Return the whole tensor of which this rank has a part."""
        shape = part.sizes_of(own, layout, part.n)
        made: Later = tensor_without_numbers(Later, shape, own)
        made.of_part, made._whole = (part, layout, own), None
        return made

    @property
    def is_read(self) -> bool:
        """Whether its rows were gathered."""
        return self._whole is not None

    def read(self) -> torch.Tensor:
        """Return the numbers."""
        if self._whole is None:
            part, layout, own = self.of_part
            (self._whole,) = _of_bytes([(own.detach(), layout, False)], part) or [own]
        return self._whole

    # What asks for the numbers in C.
    numpy: Any = _by_reading("numpy")
    tolist: Any = _by_reading("tolist")
    data_ptr: Any = _by_reading("data_ptr")
    untyped_storage: Any = _by_reading("untyped_storage")
    __array__: Any = _by_reading("__array__")
    __dlpack__: Any = _by_reading("__dlpack__")
    __reduce_ex__: Any = _by_reading("__reduce_ex__")
    __repr__: Any = _by_reading("__repr__")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch declares no class
        args, kwargs = mapped((args, kwargs or {}), lambda each: each.read() if isinstance(each, Later) else each)
        return func(*args, **kwargs)


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
