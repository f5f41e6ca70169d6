"""Divide the outermost calls of modules that have parameters; all else of a script is whole on every rank.

The first call of a form is whole. The 2nd, 4th, 8th .. 64th, and every 64th after that, is made whole and by parts, and
compared (``comparing``). What was the same is divided; all else stays whole, which is right and not faster.
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
from ddp_patch.running.divided import SUM, Layout, Part, Slots, gather, scatter, slots_of, substituted
from ddp_patch.running.lockstep import GivenUp, Lockstep
from ddp_patch.running.random_numbers import own_numbers
from ddp_patch.running.trees import PLAIN, State, mapped, tensors_in
from ddp_patch.running.whole_batch import whole_batch
from ddp_patch.validation import counted

original_call: Callable[..., Any] = nn.Module.__call__
_MOST_ROWS = 4  # dimensions that are tried
_CLOSE = 1e-4  # how far what ranks compute alike may be apart, as a part of the norm
_is_traced: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]  # torch does not list it
# What draws them gets other numbers than in one process.
_DRAWN = "the same but for dropout (random numbers drawn within divided calls)"
# So that what calls have returned is right.
_HARMLESS = ("a part of it raises", "it raises", "it leaves")


@dataclass(eq=False)
class Form:
    """How calls of one module with arguments of one form are made.

    Attributes:
        calls: How many there were.
        right: Which one was the last that was compared, and the same by parts.
        why_whole: Why all are whole; empty if they are not, or if none could be compared yet.
        rows: In which dimension each tensor that is given has the rows, or None; empty if no call is divided yet.
        layouts: How the parts of each tensor that a call returns make up the whole.
        inner: How often something within a call sees the whole batch, as batch normalisation does.
        changes: Whether a call changes what modules hold.
        gain: How many times as fast the latest call that was compared was by parts; 0 if that is not known.
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
        name: Where it was called first, and its class.
        calls: How many calls there were.
        divided: How many of these were divided.
        draws: Whether a divided call has drawn random numbers.
        forms: The forms of its calls.
        moving: The names of plain attributes that calls change.
        latest: The part of the latest call, and what stood for parameters in it; no part if it was whole.
        reasons: Why calls were whole.
    """

    name: str
    calls: int = 0
    divided: int = 0
    draws: bool = False
    forms: dict[Any, Form] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)
    latest: tuple[Part | None, dict[nn.Parameter, torch.Tensor]] = (None, {})
    reasons: dict[str, None] = field(default_factory=dict)

    def line(self, ranks: int) -> str:
        """What the summary says."""
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
    """What a call is given.

    Attributes:
        module: The module.
        args: By position.
        options: By name.
        modules: The module, and all in it.
        slots: Where their parameters are.
        tensors: All tensors that are given.
    """

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]
    modules: list[nn.Module]
    slots: Slots
    tensors: list[torch.Tensor]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained, each once."""
        return list(dict.fromkeys(each for _, _, each in self.slots if each.requires_grad))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors."""
        others = iter(tensors)
        args, options = mapped((self.args, self.options), lambda _: next(others))
        return args, options


class Calls:
    """Divides calls of modules.

    Args:
        lockstep: The ranks.
        tell: Tells the user something, once.

    Attributes:
        records: The modules that were called.
        gradients_are_own: Whether a call with gradients was whole since the last step.
    """

    def __init__(self, lockstep: Lockstep, tell: Callable[[str], object]) -> None:
        self.lockstep: Lockstep = lockstep
        self.records: list[Called] = []
        self.gradients_are_own: bool = False
        self._tell = tell
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._part: Part | None = None
        self._depth = 0
        self._is_in_backward = backward_in_progress()
        self._known: MutableMapping[nn.Module, Called] = WeakKeyDictionary()
        self._roots: MutableMapping[nn.Module, Called] = WeakKeyDictionary()  # in whose calls modules were called last
        self._root = Called("")

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook calls of modules while entered."""

        def call(module: nn.Module, *args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or not self._is_scripts():
                return original_call(module, *args, **options)
            if self._depth:
                self._roots[module] = self._root
                return original_call(module, *args, **options)
            return self._outermost(module, args, options)

        with ExitStack() as stack:
            whole_batch(lambda: self._part, stack)
            stack.enter_context(patch.object(nn.Module, "__call__", call))
            yield

    def _is_scripts(self) -> bool:
        """Return whether a call is the script's, not a worker's or a thread's, say."""
        is_elsewhere = threading.get_ident() != self._thread and not self._is_in_backward()
        return not (is_elsewhere or os.getpid() != self._process or _is_traced() or is_off())

    @contextmanager
    def within(self, part: Part | None) -> Iterator[None]:
        """Let calls be inner ones, of a divided call or of a whole one, while entered."""
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
        if is_in_backward and (root := self._roots.get(module, called)) is not None and root is not called:
            return self._again(root, module, args, options)
        if called is None:
            called = self._known[module] = Called(f"{script_line(sys._getframe())} {type(module).__name__}")
            self.records.append(called)
        self._roots[module] = self._root = called
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
        if is_compared and not is_in_backward:
            self._compare(called, form, given)
        return self._divided(called, form, given) if form.rows else self._whole(called, given)

    def _form_of(self, called: Called, given: Given) -> Form | None:
        """Return what is known of a call's form; None if it is whole, because it has too few rows."""
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
        """Make a call whole."""
        if why:
            self._say_why(called, why)
        called.latest = None, {}
        self.gradients_are_own = self.gradients_are_own or torch.is_grad_enabled()
        with self.within(None):
            return original_call(given.module, *given.args, **given.options)

    def _say_why(self, called: Called, why: str) -> None:
        called.reasons[why] = None
        self._tell(f"{called.name}: calls are whole on every rank, because {why}.")

    def _again(self, called: Called, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Make a call within a backward pass, which belongs to the latest call of the module that holds this one."""
        part, others = called.latest
        modules, slots = slots_of(module)
        with self.within(part), substituted(modules, slots, others):
            return original_call(module, *args, **options)

    def _divided(self, called: Called, form: Form, given: Given) -> Any:
        """Make a call by parts; whole, if that fails on any rank."""
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
        called.latest = (part, others) if torch.is_grad_enabled() else called.latest
        called.divided += 1
        if has_drawn and not called.draws:
            called.draws = True
            self._tell(f"{called.name}: calls are divided, {_DRAWN}.")
        return result

    def by_parts(
        self,
        given: Given,
        part: Part,
        rows: Sequence[int | None],
        parameters: dict[nn.Parameter, torch.Tensor] | None = None,
    ) -> tuple[Any, dict[nn.Parameter, torch.Tensor]]:
        """Call a module with this rank's rows.

        Args:
            given: What it is given.
            part: Which rows these are.
            rows: In which dimension each tensor has the rows.
            parameters: What stands for parameters.

        Returns:
            What this part returns, and what stood for parameters.

        Raises:
            GivenUp: It raised an error on some rank.
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
        if why := compared(self, called, form, given):
            if form.rows and not why.startswith(_HARMLESS):
                raise RankMismatchError(
                    f"Call {form.calls} of {type(given.module).__name__}, first called at {called.name}, is not by "
                    f"parts what it is whole: {why}. Call {form.right} was the last one that was compared, and it was "
                    "the same: what was computed since then may be wrong. Make these calls within "
                    "ddp_patch.unpatched(), where they are whole on every rank; or run the script on one."
                )
            form.rows, form.why_whole = (), why
            self._say_why(called, why)


def _fail(part: Part, why: str) -> NoReturn:
    """Say on all ranks that this one's part has failed.

    Raises:
        GivenUp: Always.
    """
    try:
        part.lockstep.meet(part.doing, has_failed=True)
    except GivenUp:
        raise GivenUp(why) from None
    raise AssertionError  # a rank has failed


def made_whole(output: Any, part: Part, layouts: Sequence[Layout], has_drawn: bool) -> tuple[Any, bool]:
    """Make of what its parts return what a call returns.

    Args:
        output: What this rank's part returns.
        part: Which rows these are.
        layouts: How the parts of each tensor make up the whole.
        has_drawn: Whether this rank has drawn random numbers.

    Returns:
        What the call returns, and whether some rank has drawn random numbers.

    Raises:
        GivenUp: These have other shapes than they had, or some part raised an error.
    """
    parts = tensors_in(output, objects=True)
    if len(parts) != len(layouts):
        _fail(part, "its parts return something of another shape than before")
    flag = torch.tensor([int(has_drawn)], device=parts[0].device if parts else None)
    *wholes, drawn = gather(part, [*layouts, SUM], [*parts, flag])
    found = iter(wholes)
    return mapped(output, lambda _: next(found), objects=True), bool(drawn)


def rows_of(tensors: Sequence[torch.Tensor], ranks: int) -> list[list[int | None]]:
    """Return in which dimensions tensors may have the rows: a way for each number of rows."""
    sized = [tensor for tensor in tensors if tensor.dim()]
    if not sized or len(sized[0]) < ranks:
        return []  # one sample, say, of many numbers
    numbers = dict.fromkeys(size for tensor in sized for size in tensor.shape[:2] if size >= ranks)
    return [
        [next((dim for dim, size in enumerate(tensor.shape[:2]) if size == n), None) for tensor in tensors]
        for n in [*numbers][:_MOST_ROWS]
    ]


def size_of(tensors: Sequence[torch.Tensor], rows: Sequence[int | None]) -> int:
    """Return how many rows there are; 0 if tensors do not have equally many."""
    sizes = {tensor.shape[dim] for tensor, dim in zip(tensors, rows, strict=True) if dim is not None}
    return sizes.pop() if len(sizes) == 1 else 0


def _plain(modules: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    """Return the plain attributes of modules."""
    return [(name, value) for each in modules for name, value in vars(each).items() if type(value) in PLAIN]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _why_whole(given: Given) -> str:
    """Return why nobody needs to try to divide a call; nothing if that is to be tried."""
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
