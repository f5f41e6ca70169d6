"""Make a call whole and by parts, and compare outputs, gradients, buffers, attributes and tensors that are left behind.

Both are *tries* on copies of the arguments and parameters. Random numbers are held still. The changes of a try are
undone, and its prints are not shown.
"""

import gc
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ddp_patch.compat.private_torch import tables_of
from ddp_patch.running.calls import Calls, Form, Given, made_whole, original_call, rows_of, size_of
from ddp_patch.running.divided import Layout, Others, Part, layouts_of, substituted
from ddp_patch.running.lockstep import GivenUp
from ddp_patch.running.random_numbers import Still, eager
from ddp_patch.running.trees import PLAIN, State, apart, fixed_weights, leaves_of, norm_of, tensors_in

aten: Any = torch.ops.aten
# The largest difference of an output, divided by its norm. Gradients may differ ten times as much.
_CLOSE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_CLOSE_HALF = 2e-2
# A gradient may always differ by so much of the norm of all gradients: that of a bias before batch normalisation is
# nothing but rounding.
_ROUNDINGS = 64  # times the precision of the dtype; up to six were seen
_ROUNDING_HALF = 2e-3
_UNDECIDED = "what it returns is 0"
_KEEPS = "it keeps something of its rows in"
_DEVICES = ("cpu", "cuda")


@dataclass
class _Try:
    """The result of a try.

    Attributes:
        output: The leaves of the output.
        laid: Of each output tensor, how its parts make up the whole, and the largest norm of a part.
        inner: How often a function within the call has computed over all ranks.
        gradients: The gradients of parameters and arguments, by name.
        left: Buffers, attributes and states of generators after the call, by name.
        kept: Other tensors that are still alive after the call.
        counts: Whether the call divided by a number that it had computed.
        why: Why the call cannot be divided; empty if it can.
    """

    output: list[Any] = field(default_factory=list)
    laid: Sequence[tuple[Layout, float]] = ()
    inner: int = 0
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    counts: bool = False
    why: str = ""


def compared(calls: Calls, form: Form, given: Given) -> str:
    """Make a call in both ways. If both are the same, note in its form how to divide calls.

    If numbers differ, both are made again in double precision, to see whether rounding is the reason.

    Returns:
        Why the two are not the same; empty if they are, or if this call cannot show it.
    """
    why = _compared(calls, form, given, is_double=False)
    may_be_rounding = ("differs by" in why or why.startswith(_KEEPS)) and not any(
        map(torch.is_autocast_enabled, _DEVICES)
    )
    return "" if may_be_rounding and not _compared(calls, form, given, is_double=True) else why


def _compared(calls: Calls, form: Form, given: Given, *, is_double: bool) -> str:
    """Make a call in both ways, in the script's precision or in double precision; see ``compared``."""
    reasons, state, lockstep = list[str](), State(given.modules, draws=True), calls.lockstep
    made = partial(_made, calls, given, state, is_double)
    is_collecting = gc.isenabled()
    gc.disable()  # tensors in reference cycles shall count as alive, whenever Python would collect them
    try:
        begin = time.perf_counter()
        whole = made(_whole)
        if why := lockstep.agreed(whole.why):
            return why
        for rows in [form.rows] if form.rows else rows_of(given.tensors, lockstep.ranks):
            part = Part(lockstep, f"calls {type(given.module).__name__}", size_of(given.tensors, rows))
            middle = time.perf_counter()
            parts = made(partial(_by_parts, part, rows, whole, form.layouts))
            why = parts.why or _difference(whole, parts)
            if not (why or form.rows or _are_alike(whole.kept, parts.kept)):
                why = "it leaves a tensor elsewhere than in what it returns"
            reasons.append(lockstep.agreed(why))
            if not reasons[-1]:
                form.gain = (middle - begin) / (time.perf_counter() - middle) if form.rows else 0.0
                form.right, form.rows, form.inner = form.calls, rows, parts.inner
                form.layouts = [layout for layout, _ in parts.laid]
                state.put_back()
                form.changes = not _are_alike(state.now(), whole.left)
                return ""
        return "" if _UNDECIDED in reasons else reasons[0]
    finally:
        state.put_back()
        torch.clear_autocast_cache()
        if is_collecting:
            gc.enable()


def _whole(calls: Calls, made: _Try, given: Given, parameters: Others) -> Any:
    """Make the call whole, with copies of parameters."""
    calls.remember(given, None, parameters)
    with calls.within(None), substituted(given.modules, given.slots, parameters):
        return original_call(given.module, *given.args, **given.options)


def _by_parts(
    part: Part,
    rows: Sequence[int | None],
    whole: _Try,
    layouts: Sequence[Layout],
    calls: Calls,
    made: _Try,
    given: Given,
    parameters: Others,
) -> Any:
    """Make the call by parts; find the layouts of the outputs if they are not known yet."""
    output, others = calls.by_parts(given, part, rows, parameters)
    calls.remember(given, part, others)
    made.inner = part.inner
    part.lockstep.meet(part.doing)  # where another rank may say that it has failed
    parts = tensors_in(output, objects=True)
    wholes = [each for each in whole.output if isinstance(each, torch.Tensor)]
    shapes = part.lockstep.gathered([[*each.shape] for each in parts])
    if any(len(each) != len(wholes) for each in shapes):
        raise GivenUp("it returns another number of tensors")
    of_ranks = part.of_ranks(parts, [*zip(*shapes, strict=True)]) or []
    scales = [max(map(norm_of, each)) for each in of_ranks]
    layouts = layouts or _laid_out(part, wholes, of_ranks, scales)
    made.laid = [*zip(layouts, scales, strict=True)]
    if whole.counts and any(each.kind == "mean" for each in layouts):
        raise GivenUp("it returns a mean by a number that it has computed")
    return made_whole(output, part, layouts, False)[0]


def _laid_out(
    part: Part, wholes: Sequence[torch.Tensor], of_ranks: Sequence[Sequence[torch.Tensor]], scales: Sequence[float]
) -> list[Layout]:
    """Find the layouts by which parts make up wholes. Rank 0 decides.

    Raises:
        GivenUp: There is no such layout.
    """
    found, why = list[Layout](), ""
    for at, (whole, parts, scale) in enumerate(zip(wholes, of_ranks, scales, strict=True)):
        far = {
            layout: apart(whole, layout.joined(parts, part.sizes), scale)
            for layout in layouts_of(whole.shape, [each.shape for each in parts], part.sizes)
        }
        close = [layout for layout in far if far[layout] <= _close(whole)]
        found += close[:1]
        if not close:
            why = why or _differs(min(far.values(), default=float("inf")), at, whole)
        elif close[0].kind == "alike" and whole.numel() == 1 and not whole.any():
            why = why or _UNDECIDED
    why, chosen = part.lockstep.gathered([why, [[each.kind, each.dim] for each in found]])[0]
    if why:
        raise GivenUp(why)
    return [Layout(*each) for each in chosen]


def _made(
    calls: Calls, of_script: Given, state: State, is_double: bool, call: Callable[[Calls, _Try, Given, Others], Any]
) -> _Try:
    """Make a call on copies of its arguments, and note what it computes, changes and keeps."""
    state.put_back()
    torch.default_generator.manual_seed(0)
    names = {each: name for name, each in of_script.module.named_parameters()}
    parameters = {each: _copied(each, is_double) for each in names}
    tensors = [_copied(each, is_double) for each in of_script.tensors]
    for buffers in (tables_of(each)[1] for each in of_script.modules if is_double):
        buffers.update({name: _copied(each, True) for name, each in buffers.items() if each is not None})
    args, options = of_script.with_tensors(tensors)
    given = replace(of_script, args=args, options=options, tensors=tensors)
    made, printed, refs = _Try(), io.StringIO(), list[ref[torch.Tensor]]()

    def note(func: Any, args: Any, result: Any, is_drawn: bool, draws_elsewhere: bool) -> None:
        if calls.lockstep.is_exchanging:
            return  # whose tensors the threads of the group may hold a moment longer
        made.counts = made.counts or (not is_drawn and _counts(func, args))
        made.why = "it draws from a generator of the script's own" if draws_elsewhere else made.why
        found = result if isinstance(result, list | tuple) else [result]
        new = (each for each in found if isinstance(each, torch.Tensor) and not any(each is arg for arg in args))
        refs.extend(map(ref, new))

    # Saved-tensor hooks of the script shall see no tries. Compiled code would draw random numbers past ``Still``.
    with (
        redirect_stdout(printed),
        Still(note),
        saved_tensors_hooks(_as_it_is, _as_it_is),
        eager(),
        _precision(is_double),
    ):
        try:
            output = call(calls, made, given, parameters)
            own = [*parameters.values(), *tensors]
            made.why = made.why or _derived(output, own, is_whole=call is _whole)
        except GivenUp as given_up:
            made.why = str(given_up)
        except Exception as error:  # noqa: BLE001 - the call itself will raise it
            made.why = f"it raises {type(error).__name__}"
    if made.why:
        return made
    made.output = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in leaves_of(output)]
    made.gradients = {f"the gradient of {names[each]}": other.grad for each, other in parameters.items()}
    made.gradients |= {f"the gradient of argument {at}": each.grad for at, each in enumerate(tensors)}
    made.left = state.now()
    pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = [(names[a], a, b) for a, b in parameters.items()]
    pairs += [(f"argument {at}", a, b) for at, (a, b) in enumerate(zip(of_script.tensors, tensors, strict=True))]
    if changed := [name for name, a, b in pairs if apart(a, b.to(a.dtype))]:
        made.why = f"it changes {changed[0]}"
    elif printed.getvalue():
        made.why = "it prints"
    calls.remember(of_script)
    torch.clear_autocast_cache()
    del output, args, options, given
    known = {*map(id, (*state.tensors, *own, *(each.grad for each in own)))}
    alive = {id(each): each for each in (one() for one in refs) if each is not None and id(each) not in known}
    if any(each.requires_grad for each in alive.values()):
        made.why = "it leaves a tensor that requires a gradient elsewhere than in what it returns"
    made.kept = [each.detach().clone() for each in alive.values()]
    return made


def _differs(far: float, at: int, whole: torch.Tensor) -> str:
    return f"what it returns differs by {far:.1e} of its norm in tensor {at}, of shape {tuple(whole.shape)}"


def _derived(output: Any, own: Sequence[torch.Tensor], *, is_whole: bool) -> str:
    """Run the backward pass with fixed weights for all output numbers; return why the call cannot be compared."""
    for leaf in leaves_of(output):
        if type(leaf) not in {torch.Tensor, nn.Parameter, torch.dtype, torch.device, *PLAIN}:
            return f"it returns a {type(leaf).__name__}"
    roots = [each for each in tensors_in(output, objects=True) if each.requires_grad]
    if is_whole and not {id(leaf) for leaf in _graph_leaves(roots)} <= {*map(id, own)}:
        return "it reads a tensor that requires a gradient and is neither an argument nor a parameter of it"
    if roots:
        torch.autograd.backward(roots, [*map(fixed_weights, roots)])
    sparse = [each for each in own if each.grad is not None and each.grad.layout != torch.strided]
    return "its gradient is sparse" if sparse else ""


def _graph_leaves(roots: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves of the autograd graph of some tensors."""
    yield from (each for each in roots if each.grad_fn is None)
    todo: list[Any] = [each.grad_fn for each in roots if each.grad_fn is not None]
    seen = {*todo}
    for node in todo:  # the list grows
        if hasattr(node, "variable"):
            yield node.variable
        inner = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= inner
        todo += inner


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _copied(tensor: torch.Tensor, is_double: bool) -> torch.Tensor:
    copied = tensor.detach().clone()
    copied = copied.double() if is_double and copied.is_floating_point() else copied
    return copied.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


@contextmanager
def _precision(is_double: bool) -> Iterator[None]:
    """Make new tensors in double precision while entered, or leave all as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if is_double else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _close(tensor: torch.Tensor) -> float:
    """Return the difference that is allowed for a tensor of this dtype."""
    is_half = torch.is_autocast_enabled(tensor.device.type) or tensor.dtype in {torch.float16, torch.bfloat16}
    close = _CLOSE_HALF if is_half else _CLOSE.get(tensor.dtype, 0.0)
    return close * 10 if tensor.is_cuda else close


def _rounding(grad: torch.Tensor) -> float:
    is_exact = _close(grad) == _CLOSE.get(grad.dtype)
    return _ROUNDINGS * torch.finfo(grad.dtype).eps if is_exact else _ROUNDING_HALF


def _difference(whole: _Try, parts: _Try) -> str:
    """Return what differs between a whole call and one by parts; empty if nothing does."""
    if kept := [name for name, found in whole.left.items() if not _are_alike(found, parts.left.get(name))]:
        return f"{_KEEPS} {kept[0]}"
    if len(whole.output) != len(parts.output) or any(
        a != b for a, b in zip(whole.output, parts.output, strict=True) if not isinstance(a, torch.Tensor)
    ):
        return "it returns something else"
    pairs = [(a, b) for a, b in zip(whole.output, parts.output, strict=True) if isinstance(a, torch.Tensor)]
    for at, (a, b) in enumerate(pairs):
        if (far := apart(a, b, parts.laid[at][1])) > _close(a):
            return _differs(far, at, a)
    norms = [norm_of(each) for each in whole.gradients.values() if each is not None]
    norm = sum(each**2 for each in norms) ** 0.5
    for name, grad in whole.gradients.items():
        other = parts.gradients[name]
        if grad is None or other is None:
            if grad is not other:
                return f"{name} is {'None whole' if grad is None else 'None by parts'}"
        elif (far := apart(grad, other)) > 10 * _close(grad) and far * norm_of(grad) > _rounding(grad) * norm:
            return f"{name} differs by {far:.1e} of its norm"
    return ""


def _are_alike(some: Any, others: Any) -> bool:
    """Return whether two values are equal but for rounding."""
    if isinstance(some, torch.Tensor):
        return isinstance(others, torch.Tensor) and apart(some, others) <= _close(some)
    if isinstance(some, dict):
        return all(_are_alike(each, others.get(name)) for name, each in some.items())
    if isinstance(some, list):
        return len(some) == len(others) and all(map(_are_alike, some, others))
    return bool(some == others)


def _counts(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation divides by a computed number, or selects by a mask: a mean is then not over rows."""
    if func is aten.div.Tensor:
        return isinstance(args[1], torch.Tensor) and args[1].dim() == 0
    if func in {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}:
        return bool(args[3] == 1)
    if func is aten.index.Tensor:
        return any(each is not None and each.dtype in {torch.bool, torch.uint8} for each in args[1])
    return func in {aten.masked_select.default, aten.nonzero.default}
