"""Divide the outermost calls of modules that have parameters. Every rank computes all else of a script.

A call is *whole* where every rank computes all rows, and *divided* where each rank computes its own rows. Calls of a
module with similar arguments have one *form*. The first call of a form is whole. The 2nd, 4th, 8th .. 64th call, and
every 64th after that, is made in both ways and compared (``comparing``). If both are the same, the form is divided from
then on. If not, its calls stay whole: as right as in one process, and not faster.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ddp_patch.compat.private_torch import backward_in_progress, is_within_transform
from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.hooks import script_line
from ddp_patch.running.autopatching import is_off
from ddp_patch.running.divided import SUM, Layout, Others, Part, Slots, gather, scatter, slots_of, substituted
from ddp_patch.running.lockstep import GivenUp, Lockstep
from ddp_patch.running.random_numbers import own_numbers
from ddp_patch.running.trees import PLAIN, State, mapped, tensors_in
from ddp_patch.running.whole_batch import whole_batch
from ddp_patch.validation import counted

original_call: Callable[..., Any] = nn.Module.__call__
_MOST_ROWS = 4  # numbers of rows that are tried
_CLOSE = 1e-4  # the largest difference between ranks, divided by the norm
_is_traced: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]  # torch does not list it
# Within divided calls, random numbers are not those of one process.
_DRAWN = "the same but for dropout (random numbers drawn within divided calls)"
# Reasons that appear later, and do not make the results of earlier calls wrong.
_HARMLESS = ("a part of it raises", "it raises", "it leaves")


@dataclass(eq=False)
class Form:
    """How the calls of one module with similar arguments are made.

    Attributes:
        calls: How many calls there were.
        right: The number of the latest call that was compared, and was the same in both ways.
        why_whole: Why calls are whole for good; empty if they are divided, or if no call was compared yet.
        rows: The batch dimension of each tensor among the arguments, or None; empty if calls are not divided.
        layouts: How the parts of each output tensor make up the whole.
        inner: How often a function within the call computes over all ranks, such as batch normalisation.
        changes: Whether a call changes buffers or attributes of modules.
        gain: The time of the latest compared call, whole, divided by its time by parts; 0 if not measured.
    """

    calls: int = 0
    right: int = 0
    why_whole: str = ""
    rows: Sequence[int | None] = ()
    layouts: Sequence[Layout] = ()
    inner: int = 0
    changes: bool = False
    gain: float = 0.0


@dataclass(eq=False)
class Called:
    """A module that the script has called.

    Attributes:
        name: The line of its first call, and its class.
        calls: How many calls there were.
        divided: How many calls were divided.
        draws: Whether a divided call has drawn random numbers.
        forms: The forms of its calls.
        moving: The names of plain attributes that calls change, such as counters.
        reasons: Why calls were whole.
    """

    name: str
    calls: int = 0
    divided: int = 0
    draws: bool = False
    forms: dict[Any, Form] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)
    reasons: dict[str, None] = field(default_factory=dict)

    def line(self, ranks: int) -> str:
        """The line of the summary."""
        how = f"{self.divided} divided over {counted(ranks, 'rank')}" if self.divided else "whole on every rank"
        gain = next((form.gain for form in self.forms.values() if form.gain), 1.0)
        how += f", {gain:.1f} times as fast" if gain > 1 else ", no gain" if gain < 1 else ""
        how += f", {_DRAWN}" if self.draws else ""
        reasons = [*self.reasons] or ([] if self.divided else ["too few calls, or too few rows"])
        others = f"; {counted(len(reasons) - 1, 'other reason')}" if reasons[1:] else ""
        why = f" ({reasons[0]}{others})" if reasons else ""
        return f"{self.name}: {counted(self.calls, 'call')}, {how}{why}"


@dataclass
class Given:
    """The module and the arguments of a call.

    Attributes:
        module: The module.
        args: The arguments by position.
        options: The arguments by name.
        modules: The module and all modules in it.
        slots: The places of their parameters.
        tensors: All tensors among the arguments.
    """

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]
    modules: list[nn.Module]
    slots: Slots
    tensors: list[torch.Tensor]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that require a gradient, each once."""
        return list(dict.fromkeys(each for _, _, each in self.slots if each.requires_grad))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of these."""
        others = iter(tensors)
        args, options = mapped((self.args, self.options), lambda _: next(others))
        return args, options


class Calls:
    """Divides calls of modules.

    Args:
        lockstep: The exchanges with the other ranks.
        tell: Tells the user a sentence once.
        compares_all: Whether to compare every call, not only the 2nd, 4th, 8th and so on.

    Attributes:
        records: The modules that were called.
        gradients_are_own: Whether a call since the latest step was whole, so that each rank computed its gradients.
        compared: How many calls were compared, and were the same in both ways.
    """

    def __init__(self, lockstep: Lockstep, tell: Callable[[str], object], *, compares_all: bool = False) -> None:
        self.lockstep: Lockstep = lockstep
        self.records: list[Called] = []
        self.gradients_are_own: bool = False
        self.compared: int = 0
        self._tell, self._compares_all = tell, compares_all
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._part: Part | None = None
        self._depth = 0
        self._is_in_backward = backward_in_progress()
        self._known: MutableMapping[nn.Module, Called] = WeakKeyDictionary()
        # Of each module, how the latest outermost call around it was made.
        self._latest: MutableMapping[nn.Module, tuple[Called, Part | None, Others]] = WeakKeyDictionary()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Replace ``Module.__call__`` while entered."""

        def call(module: nn.Module, *args: Any, **options: Any) -> Any:
            if self._depth or torch.compiler.is_compiling() or not self._is_scripts():
                return original_call(module, *args, **options)
            return self._outermost(module, args, options)

        with ExitStack() as stack:
            whole_batch(lambda: self._part, stack)
            stack.enter_context(patch.object(nn.Module, "__call__", call))
            yield

    def _is_scripts(self) -> bool:
        """Return whether a call may be divided: not one in a worker or a thread, say."""
        is_elsewhere = threading.get_ident() != self._thread and not self._is_in_backward()
        return not (is_elsewhere or os.getpid() != self._process or _is_traced() or is_off())

    @contextmanager
    def within(self, part: Part | None) -> Iterator[None]:
        """Mark calls as inner ones while entered: of a divided call with a part, of a whole one without."""
        before, self._part = self._part, part
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._part = before

    # ---- what becomes of a call ----

    def _outermost(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        while isinstance(module, nn.DataParallel):
            module = module.module
        modules, slots = slots_of(module)
        if not slots or self.lockstep.ranks == 1:
            return original_call(module, *args, **options)
        is_in_backward = self._is_in_backward()
        called = self._known.get(module)
        if is_in_backward:
            root, part, others = self._latest.get(module, (called, None, {}))
            if called is None or root is not called:  # an inner call is made anew, as activation checkpointing does
                with self.within(part), substituted(modules, slots, others):
                    return original_call(module, *args, **options)
        if called is None:
            called = self._known[module] = Called(f"{script_line(sys._getframe())} {type(module).__name__}")
            self.records.append(called)
        called.calls += 1
        self.lockstep.calls += 1
        given = Given(module, args, options, modules, slots, tensors_in((args, options)))
        why = _why_whole(given)
        form = None if why or any(nn.parameter.is_lazy(each) for _, _, each in slots) else self._form_of(called, given)
        if form is None or (is_in_backward and not form.rows) or form.why_whole:
            return self._whole(called, given, why)
        form.calls += not is_in_backward
        if form.calls == 1:
            before = _plain(modules)
            result = self._whole(called, given)
            after = _plain(modules)
            called.moving |= {name for (name, a), (_, b) in zip(before, after, strict=False) if a is not b and a != b}
            return result
        is_compared = form.calls % 64 == 0 or (form.calls < 64 and form.calls & (form.calls - 1) == 0)
        if (is_compared or self._compares_all) and not is_in_backward:
            self._compare(called, form, given)
        return self._divided(called, form, given) if form.rows else self._whole(called, given)

    def _form_of(self, called: Called, given: Given) -> Form | None:
        """Return the form of a call; None if there are too few rows to divide."""
        device = given.tensors[0].device.type if given.tensors else "cpu"
        key = (
            tuple((each.dtype, each.requires_grad, tuple(size == 1 for size in each.shape)) for each in given.tensors),
            (torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
            tuple(each for each in (*given.args, *given.options.values()) if type(each) in {bool, str, type(None)}),
            tuple(given.options),
            tuple(each.requires_grad for _, _, each in given.slots),
            tuple(value for name, value in _plain(given.modules) if name not in called.moving),
        )
        form, ranks = called.forms.setdefault(key, Form()), self.lockstep.ranks
        enough = size_of(given.tensors, form.rows) >= ranks if form.rows else rows_of(given.tensors, ranks)
        return form if enough else None

    def _whole(self, called: Called, given: Given, why: str = "") -> Any:
        """Make a call whole, and tell why, if there is a reason."""
        if why:
            self._say_why(called, why)
        self.remember(given)
        self.gradients_are_own = self.gradients_are_own or torch.is_grad_enabled()
        with self.within(None):
            return original_call(given.module, *given.args, **given.options)

    def _say_why(self, called: Called, why: str) -> None:
        called.reasons[why] = None
        self._tell(f"{called.name}: calls are whole on every rank, because {why}.")

    def remember(self, given: Given, part: Part | None = None, others: Others | None = None) -> None:
        """Note how an outermost call is made, for calls of the same modules within its backward pass."""
        if torch.is_grad_enabled():
            made = self._known[given.module], part, others or {}
            self._latest.update(dict.fromkeys(given.modules, made))

    def _divided(self, called: Called, form: Form, given: Given) -> Any:
        """Make a divided call; if it fails on any rank, make it whole on all."""
        part = Part(self.lockstep, f"calls {type(given.module).__name__}", size_of(given.tensors, form.rows))
        state = State(given.modules, draws=False) if form.changes else None
        has_drawn = False
        try:
            with own_numbers(self.lockstep.rank, lambda: has_drawn) as are_drawn:
                output, others = self.by_parts(given, part, form.rows)
                if part.inner != form.inner:
                    _fail(part, "something that sees the whole batch is compiled, or not always computed")
                result, has_drawn = made_whole(output, part, form.layouts, are_drawn())
        except GivenUp as given_up:
            if state is not None:
                state.put_back()
            form.rows, form.why_whole = (), str(given_up)
            return self._whole(called, given, form.why_whole)
        self.remember(given, part, others)
        called.divided += 1
        if has_drawn and not called.draws:
            called.draws = True
            self._tell(f"{called.name}: calls are divided, {_DRAWN}.")
        return result

    def by_parts(
        self, given: Given, part: Part, rows: Sequence[int | None], parameters: Others | None = None
    ) -> tuple[Any, Others]:
        """Call a module with the rows of this rank.

        Args:
            given: The module and its whole arguments.
            part: The rows of this rank.
            rows: The batch dimension of each tensor among the arguments.
            parameters: Tensors to take in place of parameters.

        Returns:
            The outputs for these rows, and the tensors that were in the places of parameters.

        Raises:
            GivenUp: The call raises an error on some rank.
        """
        others = {**(parameters or {})}
        trained = given.parameters if torch.is_grad_enabled() else []
        layouts = [SUM] * len(trained) + [SUM if dim is None else Layout("rows", dim) for dim in rows]
        parts = scatter(part, layouts, [*(others.get(each, each) for each in trained), *given.tensors])
        others |= zip(trained, parts, strict=False)
        args, options = given.with_tensors(parts[len(trained) :])
        try:
            with self.within(part), substituted(given.modules, given.slots, others):
                return original_call(given.module, *args, **options), others
        except Exception as error:
            if self._is_in_backward():  # as checkpointing ends what it has seen enough of
                raise
            _fail(part, f"a part of it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _compare(self, called: Called, form: Form, given: Given) -> None:
        from ddp_patch.running.comparing import compared  # which imports this module

        names = [*given.parameters, *given.tensors]
        doing = f"compares a call of {type(given.module).__name__}"
        self.lockstep.require_alike(doing, [(f"tensor {at}", each) for at, each in enumerate(names)], _CLOSE)
        if why := compared(self, form, given):
            if form.rows and not why.startswith(_HARMLESS):
                raise RankMismatchError(
                    f"Call {form.calls} of {type(given.module).__name__} is not by parts what it is whole: {why}. Call "
                    f"{form.right} was the last one that was compared, and it was the same: what was computed since "
                    f"then may be wrong. Make these calls (the first is at {called.name.rpartition(' ')[0]}) within "
                    "ddp_patch.unpatched(), where they are whole on every rank; or run the script on one."
                )
            form.rows, form.why_whole = (), why
            self._say_why(called, why)
        elif form.rows:
            self.compared += 1


def _fail(part: Part, why: str) -> NoReturn:
    """Tell all ranks that the part of this rank has failed.

    Raises:
        GivenUp: Always.
    """
    try:
        part.lockstep.meet(part.doing, has_failed=True)
    except GivenUp:
        raise GivenUp(why) from None
    raise AssertionError  # a rank has failed


def made_whole(output: Any, part: Part, layouts: Sequence[Layout], has_drawn: bool) -> tuple[Any, bool]:
    """Gather the outputs of a divided call.

    Args:
        output: The output of this rank's part.
        part: The rows of this rank.
        layouts: How the parts of each output tensor make up the whole.
        has_drawn: Whether this rank has drawn random numbers.

    Returns:
        The output for all rows, and whether any rank has drawn random numbers.

    Raises:
        GivenUp: Some part has other shapes than when it was compared, or raised an error.
    """
    parts = tensors_in(output, objects=True)
    if len(parts) != len(layouts):
        _fail(part, "its parts return something of another shape than before")
    flag = torch.tensor([int(has_drawn)], device=parts[0].device if parts else None)
    *wholes, drawn = gather(part, [*layouts, SUM], [*parts, flag])
    found = iter(wholes)
    return mapped(output, lambda _: next(found), objects=True), bool(drawn)


def rows_of(tensors: Sequence[torch.Tensor], ranks: int) -> list[list[int | None]]:
    """Return possible batch dimensions of tensors: one list for each possible number of rows."""
    sized = [tensor for tensor in tensors if tensor.dim()]
    if not sized or len(sized[0]) < ranks:
        return []  # one sample, say, of many numbers
    numbers = dict.fromkeys(size for tensor in sized for size in tensor.shape[:2] if size >= ranks)
    return [
        [next((dim for dim, size in enumerate(tensor.shape[:2]) if size == n), None) for tensor in tensors]
        for n in [*numbers][:_MOST_ROWS]
    ]


def size_of(tensors: Sequence[torch.Tensor], rows: Sequence[int | None]) -> int:
    """Return the number of rows in these batch dimensions; 0 if it is not the same in all tensors."""
    sizes = {tensor.shape[dim] for tensor, dim in zip(tensors, rows, strict=True) if dim is not None}
    return sizes.pop() if len(sizes) == 1 else 0


def _plain(modules: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    """Return the attributes of modules that are numbers, strings or None."""
    return [(name, value) for each in modules for name, value in vars(each).items() if type(value) in PLAIN]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _why_whole(given: Given) -> str:
    """Return why a call is not even tried by parts; empty if it is to be tried."""
    if is_within_transform():
        return "it is called within torch.func"
    if any(each.layout != torch.strided or each.is_nested for each in given.tensors):
        return "it is given sparse or nested tensors"
    if any(isinstance(each, PackedSequence) for each in (*given.args, *given.options.values())):
        return "it is given a PackedSequence"
    for each in given.modules:
        if isinstance(each, torch.jit.ScriptModule):
            return "torch.jit has compiled it"
        for name in _HOOKS:
            for hook in vars(each)[name].values():
                if not str(getattr(hook, "__module__", "")).startswith("torch."):
                    return f"a {type(each).__name__} in it has a hook"
    return ""
