"""Make a call whole and by parts, and compare: what it returns, its gradients, and what it leaves behind.

Both are tries, with random numbers held still: what they change is put back, and what they print is not shown.
"""

import gc
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ddp_patch.running.calls import Called, Calls, Form, Given, made_whole, original_call, rows_of, size_of
from ddp_patch.running.divided import Layout, Part, layouts_of, substituted
from ddp_patch.running.lockstep import GivenUp, Lockstep
from ddp_patch.running.random_numbers import Still, eager
from ddp_patch.running.trees import PLAIN, State, apart, fixed_weights, leaves_of, norm_of, tensors_in

aten: Any = torch.ops.aten
_Parameters: TypeAlias = dict[nn.Parameter, torch.Tensor]  # and what stands for them
# How far apart a call may be by parts, as a part of the norm; gradients ten times as far.
_CLOSE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_CLOSE_HALF = 2e-2
# How far a gradient may always be, of the norm of all: that of a bias before batch normalisation is rounding alone.
_ROUNDINGS = 64  # of this many roundings of numbers; six were seen
_ROUNDING_HALF = 2e-3
_UNDECIDED = "what it returns is 0"


@dataclass
class _Try:
    """What a try gave.

    Attributes:
        output: What it returned.
        layouts: How the parts of each tensor that it returned make up the whole.
        scales: The largest norm of the parts of each: they may add up to nearly 0.
        gradients: Of parameters and arguments, by name.
        left: What modules and generators have afterwards, by name.
        kept: Tensors that are held elsewhere afterwards.
        counts: Whether it took a mean by a number that it has computed.
        why: Why this call cannot be divided.
    """

    output: list[Any] = field(default_factory=list)
    layouts: Sequence[Layout] = ()
    scales: Sequence[float] = ()
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    counts: bool = False
    why: str = ""


def compared(calls: Calls, called: Called, form: Form, given: Given) -> str:
    """Compare a call, and note in its form how calls are divided.

    Returns:
        Why it is not the same by parts; empty if it is, or if this call does not show that.
    """
    reasons, before, state, lockstep = list[str](), called.latest, State(given.modules, draws=True), calls.lockstep
    made = partial(_made, calls, called, given, state)
    is_collecting = gc.isenabled()
    gc.disable()  # so that what is held in cycles of references counts as what is held, whenever they are collected
    try:
        begin = time.perf_counter()
        whole = made(_whole)
        if why := _agreed(lockstep, whole.why):
            return why
        for rows in [form.rows] if form.rows else rows_of(given.tensors, lockstep.ranks):
            part = Part(lockstep, f"calls {type(given.module).__name__}", size_of(given.tensors, rows))
            middle = time.perf_counter()
            parts = made(partial(_by_parts, part, rows, whole, form.layouts))
            why = parts.why or _difference(whole, parts)
            if not (why or form.rows or _are_alike(whole.kept, parts.kept)):
                why = "it leaves a tensor elsewhere than in what it returns"
            reasons.append(_agreed(lockstep, why))
            if not reasons[-1]:
                form.gain = (middle - begin) / (time.perf_counter() - middle) if form.rows else 0.0
                form.right, form.rows, form.layouts, form.inner = form.calls, rows, parts.layouts, part.inner
                state.put_back()
                form.changes = not _are_alike(state.now(), whole.left)
                return ""
        return "" if _UNDECIDED in reasons else reasons[0]
    finally:
        state.put_back()
        called.latest = before
        torch.clear_autocast_cache()
        if is_collecting:
            gc.enable()


def _agreed(lockstep: Lockstep, why: str) -> str:
    """Return the reason of the first rank that has one."""
    return next(filter(None, lockstep.gathered(why)), "")


def _whole(calls: Calls, called: Called, made: _Try, given: Given, parameters: _Parameters) -> Any:
    """Make the call whole."""
    called.latest = None, parameters
    with calls.within(None), substituted(given.modules, given.slots, parameters):
        return original_call(given.module, *given.args, **given.options)


def _by_parts(
    part: Part,
    rows: Sequence[int | None],
    whole: _Try,
    layouts: Sequence[Layout],
    calls: Calls,
    called: Called,
    made: _Try,
    given: Given,
    parameters: _Parameters,
) -> Any:
    """Make the call by parts; where nobody knows how these make up the whole, find that."""
    output, others = calls.by_parts(given, part, rows, parameters)
    called.latest = part, others
    part.lockstep.meet(part.doing)  # where another rank may say that it has failed
    parts = tensors_in(output, objects=True)
    wholes = [each for each in whole.output if isinstance(each, torch.Tensor)]
    shapes = part.lockstep.gathered([[*each.shape] for each in parts])
    if any(len(each) != len(wholes) for each in shapes):
        raise GivenUp("it returns another number of tensors")
    of_ranks = part.of_ranks(parts, [*zip(*shapes, strict=True)]) or []
    made.scales = [max(map(norm_of, each)) for each in of_ranks]
    made.layouts = layouts or _laid_out(part, wholes, of_ranks, made.scales)
    if whole.counts and any(each.kind == "mean" for each in made.layouts):
        raise GivenUp("it returns a mean by a number that it has computed")
    return made_whole(output, part, made.layouts, False)[0]


def _laid_out(
    part: Part, wholes: Sequence[torch.Tensor], of_ranks: Sequence[Sequence[torch.Tensor]], scales: Sequence[float]
) -> list[Layout]:
    """Find how parts make up wholes, as rank 0 finds it.

    Raises:
        GivenUp: They do not.
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
    calls: Calls,
    called: Called,
    of_script: Given,
    state: State,
    call: Callable[[Calls, Called, _Try, Given, _Parameters], Any],
) -> _Try:
    """Make a try of copies of what the call is given, and note all that it does."""
    state.put_back()
    torch.default_generator.manual_seed(0)
    names = {each: name for name, each in of_script.module.named_parameters()}
    parameters, tensors = {each: _copied(each) for each in names}, [*map(_copied, of_script.tensors)]
    args, options = of_script.with_tensors(tensors)
    given = replace(of_script, args=args, options=options, tensors=tensors)
    made, printed, refs = _Try(), io.StringIO(), list[ref[torch.Tensor]]()

    def note(func: Any, args: Any, result: Any, is_drawn: bool, draws_elsewhere: bool) -> None:
        if calls.lockstep.is_exchanging:
            return  # of which the group's threads may hold tensors for a moment
        made.counts = made.counts or (not is_drawn and _counts(func, args))
        made.why = "it draws from a generator of the script's own" if draws_elsewhere else made.why
        found = result if isinstance(result, list | tuple) else [result]
        new = (each for each in found if isinstance(each, torch.Tensor) and not any(each is arg for arg in args))
        refs.extend(map(ref, new))

    # The hooks around the call see no tries, and compiled code would draw numbers that nobody holds still.
    with redirect_stdout(printed), Still(note), saved_tensors_hooks(_as_it_is, _as_it_is), eager():
        try:
            output = call(calls, called, made, given, parameters)
            own = [*parameters.values(), *tensors]
            made.why = made.why or _derived(output, own, is_whole=called.latest[0] is None)
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
    if changed := [name for name, a, b in pairs if apart(a, b)]:
        made.why = f"it changes {changed[0]}"
    elif printed.getvalue():
        made.why = "it prints"
    called.latest = None, {}
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
    """Compute the gradients of an output, each number of which weighs something; return why that cannot be."""
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
    """Yield what tensors are computed from that requires a gradient."""
    yield from (each for each in roots if each.grad_fn is None)
    todo: list[Any] = [each.grad_fn for each in roots if each.grad_fn is not None]
    seen = {*todo}
    for node in todo:  # which grows
        if hasattr(node, "variable"):
            yield node.variable
        inner = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= inner
        todo += inner


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


def _close(tensor: torch.Tensor) -> float:
    """Return how far what is computed may be apart."""
    is_half = torch.is_autocast_enabled(tensor.device.type) or tensor.dtype in {torch.float16, torch.bfloat16}
    close = _CLOSE_HALF if is_half else _CLOSE.get(tensor.dtype, 0.0)
    return close * 10 if tensor.is_cuda else close


def _rounding(grad: torch.Tensor) -> float:
    is_exact = _close(grad) == _CLOSE.get(grad.dtype)
    return _ROUNDINGS * torch.finfo(grad.dtype).eps if is_exact else _ROUNDING_HALF


def _difference(whole: _Try, parts: _Try) -> str:
    """Return what of a call by parts is not what it is of a whole one."""
    if kept := [name for name, found in whole.left.items() if not _are_alike(found, parts.left.get(name))]:
        return f"it keeps something of its rows in {kept[0]}"
    if len(whole.output) != len(parts.output) or any(
        a != b for a, b in zip(whole.output, parts.output, strict=True) if not isinstance(a, torch.Tensor)
    ):
        return "it returns something else"
    pairs = [(a, b) for a, b in zip(whole.output, parts.output, strict=True) if isinstance(a, torch.Tensor)]
    for at, (a, b) in enumerate(pairs):
        if (far := apart(a, b, parts.scales[at])) > _close(a):
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
    """Return whether two values are the same, but for rounding."""
    if isinstance(some, torch.Tensor):
        return isinstance(others, torch.Tensor) and apart(some, others) <= _close(some)
    if isinstance(some, dict):
        return all(_are_alike(each, others.get(name)) for name, each in some.items())
    if isinstance(some, list):
        return len(some) == len(others) and all(map(_are_alike, some, others))
    return bool(some == others)


def _counts(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation takes a mean by a number that was computed, or of what it has chosen."""
    if func is aten.div.Tensor:
        return isinstance(args[1], torch.Tensor) and args[1].dim() == 0
    if func in {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}:
        return bool(args[3] == 1)
    if func is aten.index.Tensor:
        return any(each is not None and each.dtype in {torch.bool, torch.uint8} for each in args[1])
    return func in {aten.masked_select.default, aten.nonzero.default}
