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
from ddp_patch.running.divided import (
    Later,
    Layout,
    Part,
    Slots,
    cut,
    gather,
    scatter,
    shared,
    sizes_of,
    slots_of,
    substituted,
    whole_batch,
)
from ddp_patch.running.loader_reports import is_off
from ddp_patch.running.lockstep import GivenUp, Lockstep
from ddp_patch.running.random_numbers import own_numbers
from ddp_patch.running.trees import PLAIN, State, mapped, tensors_in
from ddp_patch.validation import counted

__all__ = ["Called", "Calls", "Form", "Given", "original_call", "rows_of", "size_of"]

original_call: Callable[..., Any] = nn.Module.__call__
_MOST_ROWS = 4  # dimensions that are tried
_CLOSE = 1e-4  # how far what ranks compute alike may be apart, as a part of the norm
_NOTHING = object()
_LARGE = 2**18  # bytes of a part of what a module returns beside its loss
_is_traced: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]  # torch does not list it
# What draws them gets other numbers than in one process.
_DRAWN = "the same but for dropout (random numbers drawn within divided calls)"
# So that what calls have returned is right.
_HARMLESS = ("a part of it raises", "it raises", "it leaves")


@dataclass(eq=False)
class Form:
    """What is known of calls of one module with arguments of one form.

    Attributes:
        calls: How many there were.
        right: Which one was the last that was the same by parts; 0 if none was compared.
        rows: In which dimension each tensor that is given has the rows; None for one that has none.
        layouts: How the parts of each tensor that a call returns make up the whole.
        inner: How often something within a call sees the whole batch, as batch normalisation does.
        changes: Whether a call changes what modules hold.
        draws: Whether a divided call has drawn random numbers.
        why_whole: Why its calls are whole; empty if they are not.
    """

    calls: int = 0
    inner: int = 0
    changes: bool = False
    draws: bool = False
    right: int = 0
    rows: list[int | None] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    why_whole: str = ""


@dataclass(eq=False)
class Called:
    """A module that the script has called.

    Attributes:
        name: Its class.
        place: Where it was called first.
        forms: The forms of its calls.
        divided: How many calls were divided.
        calls: How many calls there were.
        moving: The names of plain attributes that calls change.
        latest: The part of the latest call, and what stood for parameters in it; no part if it was whole.
        seconds: What the latest call that was compared took whole, and by parts.
        reasons: Why calls were whole.
    """

    name: str
    place: str
    forms: dict[Any, Form] = field(default_factory=dict)
    divided: int = 0
    calls: int = 0
    moving: set[str] = field(default_factory=set)
    latest: tuple[Part | None, dict[nn.Parameter, torch.Tensor]] = (None, {})
    seconds: tuple[float, float] = (0.0, 0.0)
    reasons: dict[str, None] = field(default_factory=dict)

    def line(self, ranks: int) -> str:
        """What the summary says."""
        how = f"{self.divided} divided over {counted(ranks, 'rank')}" if self.divided else "whole on every rank"
        whole, parts = self.seconds
        gain = f", {whole / parts:.1f} times as fast" if parts < whole else ", no gain" if parts else ""
        gain += f", {_DRAWN}" if any(form.draws for form in self.forms.values()) else ""
        reasons = [*self.reasons]
        others = f"; {counted(len(reasons) - 1, 'other reason')}" if reasons[1:] else ""
        why = reasons[0] + others if reasons else ("" if self.divided else "too few calls, or too few rows")
        return f"{self.place} {self.name}: {counted(self.calls, 'call')}, {how}{gain}" + (f" ({why})" if why else "")


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
        begin: Called before the first call, to join them.
        tell: Tells the user something, once.
    """

    def __init__(self, lockstep: Lockstep, begin: Callable[[], None], tell: Callable[[str], object]) -> None:
        self.lockstep: Lockstep = lockstep
        self.tell: Callable[[str], object] = tell
        self.records: list[Called] = []
        self.gradients_are_own: bool = False  # a call with gradients was whole since the last step
        self.error: str = ""  # what this rank's latest part has raised
        self._begin = begin
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._part: Part | None = None
        self._depth = 0
        self._is_in_backward = backward_in_progress()
        self._known: MutableMapping[nn.Module, Called] = WeakKeyDictionary()
        self._roots: MutableMapping[nn.Module, Called] = WeakKeyDictionary()  # in whose calls modules were called last
        self._root = Called("", "")

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
        if not slots:
            return original_call(module, *args, **options)
        args, options = mapped((args, options), lambda each: each.made() if isinstance(each, Later) else each)
        self._begin()
        if self.lockstep.ranks == 1:
            return original_call(module, *args, **options)
        is_in_backward = self._is_in_backward()
        called = self._known.get(module)
        if is_in_backward and (root := self._roots.get(module, called)) is not None and root is not called:
            return self._again(root, module, args, options)
        if called is None:
            called = self._known[module] = Called(type(module).__name__, script_line(sys._getframe()))
            self.records.append(called)
        self._roots[module] = self._root = called
        called.calls += 1
        self.lockstep.calls += 1
        given = Given(module, args, options, modules, slots, tensors_in((args, options)))
        why = _why_whole(given)
        form = None if why or any(nn.parameter.is_lazy(each) for _, _, each in slots) else self._form_of(called, given)
        if form is None or (is_in_backward and not form.right) or form.why_whole:
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
        return self._divided(called, form, given) if form.right else self._whole(called, given)

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
        form = called.forms.setdefault(key, Form())
        if form.right:
            return form if size_of(given.tensors, form.rows) >= self.lockstep.ranks else None
        return form if rows_of(given.tensors, self.lockstep.ranks) else None

    def _whole(self, called: Called, given: Given, why: str = "") -> Any:
        """Make a call whole."""
        if why and why not in called.reasons:
            called.reasons[why] = None
            self.tell(f"{called.place} {called.name}: calls are whole on every rank, because {why}.")
        called.latest = None, {}
        self.gradients_are_own = self.gradients_are_own or torch.is_grad_enabled()
        with self.within(None):
            return original_call(given.module, *given.args, **given.options)

    def _again(self, called: Called, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Make a call within a backward pass, which belongs to the latest call of the module that holds this one."""
        part, others = called.latest
        modules, slots = slots_of(module)
        with self.within(part), substituted(modules, slots, others):
            return original_call(module, *args, **options)

    def _divided(self, called: Called, form: Form, given: Given) -> Any:
        """Make a call by parts; whole, if that fails on any rank."""
        part = Part(self.lockstep, f"calls {called.name}", size_of(given.tensors, form.rows))
        state = State(given.modules) if form.changes else None
        has_drawn = False
        with own_numbers(self.lockstep.rank, lambda: has_drawn) as are_drawn:
            try:
                output, others = self.by_parts(given, part, form.rows)
                if part.inner != form.inner:
                    self.error = "something that sees the whole batch is compiled, or not always computed"
                    self._failed(part)
                result, has_drawn = self.made_whole(output, part, form.layouts, are_drawn())
            except GivenUp:
                others, result = {}, _NOTHING
        if result is _NOTHING:
            if state is not None:
                state.put_back()
            form.right, form.why_whole = 0, self.error or "a part of it raises an error on some rank"
            return self._whole(called, given, form.why_whole)
        called.latest = (part, others) if torch.is_grad_enabled() else called.latest
        called.divided += 1
        if has_drawn and not form.draws:
            form.draws = True
            self.tell(f"{called.place} {called.name}: calls are divided, {_DRAWN}.")
        return result

    def by_parts(
        self,
        given: Given,
        part: Part,
        dims: Sequence[int | None],
        parameters: dict[nn.Parameter, torch.Tensor] | None = None,
    ) -> tuple[Any, dict[nn.Parameter, torch.Tensor]]:
        """Call a module with this rank's rows.

        Args:
            given: What it is given.
            part: Which rows these are.
            dims: In which dimension each tensor has the rows.
            parameters: What stands for parameters.

        Returns:
            What this part returns, and what stood for parameters.

        Raises:
            GivenUp: It raised an error on some rank.
        """
        begin, end = part.bounds[part.lockstep.rank :][:2]
        tensors, is_derived = [*given.tensors], torch.is_grad_enabled()
        divided = [at for at, dim in enumerate(dims) if dim is not None and is_derived and tensors[at].requires_grad]
        common = [at for at, dim in enumerate(dims) if dim is None and is_derived and tensors[at].requires_grad]
        layouts = [Layout("rows", dim or 0) for dim in dims]
        trained = [(each, each if parameters is None else parameters[each]) for each in given.parameters if is_derived]
        scattered = scatter(part, [layouts[at] for at in divided], *(tensors[at] for at in divided)) if divided else ()
        wholes = [*(whole for _, whole in trained), *(tensors[at] for at in common)]
        as_parts = shared(part, *wholes) if wholes else ()
        others = {each: other for (each, _), other in zip(trained, as_parts, strict=False)}
        for at, dim in enumerate(dims):
            if dim is not None and at not in divided:
                tensors[at] = cut(tensors[at], layouts[at], begin, end, part.n).contiguous()
        for at, tensor in zip((*divided, *common), (*scattered, *as_parts[len(trained) :]), strict=True):
            tensors[at] = tensor
        args, options = given.with_tensors(tensors)
        others |= {} if parameters is None else {each: parameters[each] for each in parameters if each not in others}
        try:
            with self.within(part), substituted(given.modules, given.slots, others):
                return original_call(given.module, *args, **options), others
        except Exception as error:
            if self._is_in_backward():  # as checkpointing ends what it has seen enough of
                raise
            self.error = f"a part of it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._failed(part)

    def _failed(self, part: Part) -> NoReturn:
        self.lockstep.meet(part.doing, has_failed=True)
        raise AssertionError  # a rank has failed

    def made_whole(
        self, output: Any, part: Part, layouts: Sequence[Layout], has_drawn: bool | None = None
    ) -> tuple[Any, bool]:
        """Make of what its parts return what a call returns.

        Args:
            output: What this rank's part returns.
            part: Which rows these are.
            layouts: How the parts of each tensor make up the whole.
            has_drawn: Whether this rank has drawn random numbers. None: this is a try, of which nobody asks.

        Returns:
            What the call returns, and whether some rank has drawn random numbers.

        Raises:
            GivenUp: These have other shapes than they had, or some part raised an error.
        """
        parts = tensors_in(output, objects=True)
        self.error = "its parts return something of another shape than before"
        if len(parts) != len(layouts):
            self._failed(part)
        flag, rows = torch.tensor([bool(has_drawn)], dtype=torch.uint8), part.sizes[self.lockstep.rank]
        flag = flag.to(parts[0].device) if parts else flag
        late = [] if has_drawn is None else _late(parts, layouts)
        part.late = tuple(size for at in late for size in sizes_of(parts[at], layouts[at], rows))
        now = [at for at in range(len(parts)) if at not in late]
        *wholes, drawn = gather(part, [*(layouts[at] for at in now), Layout("sum")], *(parts[at] for at in now), flag)
        part.late = ()
        found = dict(zip(now, wholes, strict=True)) | {at: Later.of(part, layouts[at], parts[at]) for at in late}
        places = iter(range(len(parts)))
        return mapped(output, lambda _: found[next(places)], objects=True), bool(drawn)

    def _compare(self, called: Called, form: Form, given: Given) -> None:
        from ddp_patch.running.comparing import compared  # which imports this module

        doing = f"compares a call of {called.name}"
        names = [*given.parameters, *given.tensors]
        self.lockstep.require_alike(doing, [(f"tensor {at}", each) for at, each in enumerate(names)], _CLOSE)
        self.error = ""
        why = compared(self, called, form, given)
        if why and form.right and not why.startswith(_HARMLESS):
            raise RankMismatchError(
                f"Call {form.calls} of {called.name}, first called at {called.place}, is not by parts what it is "
                f"whole: {why}. Call {form.right} was the last one that was compared, and it was the same: what was "
                "computed since then may be wrong. Make these calls within ddp_patch.unpatched(), where they are whole "
                "on every rank; or run the script on one."
            )
        if why:
            form.right, form.why_whole = 0, why
            called.reasons[why] = None
            self.tell(f"{called.place} {called.name}: calls are whole on every rank, because {why}.")
        elif why is not None:
            form.right = form.calls


def _late(parts: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> list[int]:
    """Return which outputs wait until somebody reads them: large ones of a module that returns its loss as well."""
    has_loss = any(layout.kind == "mean" and not part.dim() for part, layout in zip(parts, layouts, strict=True))
    pairs = enumerate(zip(parts, layouts, strict=True)) if has_loss else ()
    return [at for at, (part, layout) in pairs if layout.kind == "rows" and part.nbytes > _LARGE]


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
