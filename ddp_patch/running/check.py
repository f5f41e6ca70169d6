"""Run a script's first steps on one rank and on several, and say whether they do the same: ``ddp-patch run --check``.

It runs three times, with all switched off that ranks draw for themselves: on one rank; again, which shows what it
prints and writes otherwise by itself; and on several ranks. Each rank records what it trains. No run writes into the
user's folders.
"""

import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_patch.compat.private_torch import items_changed
from ddp_patch.orders.random_states import GlobalState
from ddp_patch.running.launch import ALONE, made_equal
from ddp_patch.running.overlay import open_file
from ddp_patch.running.random_numbers import Still, eager
from ddp_patch.validation import counted

__all__ = ["RECORDING", "check", "recorded"]

# The environment's name of the folder where the ranks of a run record what they do; its own name ends in the precision.
RECORDING = "DDP_PATCH_RECORDING"

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_CLOSE_TEXT = 1e-3  # of a number that is printed, and rounded for that
_CLOSE = {True: 1e-8, False: 1e-3}  # how far apart steps may be, in double precision and in single
_LAST_LINES = 12
_MOST_NUMBERS = 2**14  # of each tensor; of larger ones, so many at equal distances, and the mean of all
_save = torch.save


# ---- what each rank records ----


class _Recorder:
    """Records the first steps of a script, and ends it then.

    Args:
        folder: Where it records.
        most: How many steps.

    Attributes:
        steps: What each step of an optimizer did: ``is_double`` (whether all parameters are of double precision),
            ``gradients`` that the optimizer got, by the parameters' names, and ``parameters``: what it made of them.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.steps: list[dict[str, Any]] = []
        self._folder, self._most = folder, most
        self._names: dict[torch.Tensor, str] = {}
        self._calls: list[Still] = []

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        parameters, names = [each for group in optimizer.param_groups for each in group["params"]], self._names
        if not all(each in names for each in parameters):
            new = (each for each in parameters if each not in names)
            names |= {each: f"parameter {number}" for number, each in enumerate(new, len(names))}
        self.steps.append(
            {
                "is_double": all(each.dtype == torch.float64 for each in parameters),
                "gradients": {names[each]: _sample(each.grad) for each in parameters if each.grad is not None},
                "parameters": {names[each]: _sample(each) for each in parameters},
            }
        )
        if len(self.steps) >= self._most:
            sys.exit()

    # ---- what is held still: files name it, for whoever told it to be recorded ----

    def off(self, name: str) -> None:
        with open_file(self._folder / f"off {name}", "w"):  # past what lies over the file system
            pass

    def note(self, operation: Any, _args: Any, _result: Any, is_drawn: bool, _is_elsewhere: bool) -> None:
        if is_drawn:
            name = operation.overloadpacket.__name__
            self.off("dropout" if "dropout" in name or "bernoulli" in name else "noise")

    def before_forward(self, module: nn.Module, _args: Any) -> None:
        if not all(each in self._names for each in module.parameters()):  # the outermost module is called first
            self._names |= {each: name for name, each in module.named_parameters() if each not in self._names}
        self._calls.append(Still(self.note).__enter__())  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    def after_forward(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._calls.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above

    def item_of(self, dataset: Any, index: Any) -> Any:
        """Return an item of a dataset, whose random numbers follow from its index."""
        before, own = GlobalState.capture(), GlobalState.seeded(np.random.SeedSequence(crc32(repr(index).encode())))
        seeded = own.copied().values()
        own.install()
        try:
            return dataset[index]
        finally:
            if GlobalState.capture().values() != seeded:
                self.off("random transforms")
            before.install()


@contextmanager
def recorded(folder: Path, rank: int, steps: int) -> Iterator[None]:
    """Record a script while entered, with all still that ranks draw for themselves; end it after its first steps.

    Args:
        folder: Where the ranks record.
        rank: This rank.
        steps: How many steps of optimizers.
    """
    recorder, is_double = _Recorder(folder, steps), folder.name.endswith("double")
    begin = torch.autocast.__init__

    def without_autocast(self: torch.autocast, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        if self._enabled:
            recorder.off("autocast")
        self._enabled = False

    with ExitStack() as stack:
        stack.enter_context(eager())
        stack.enter_context(patch.object(torch.autocast, "__init__", without_autocast))
        stack.enter_context(items_changed(recorder.item_of, _double if is_double else lambda item: item))
        if is_double:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        stack.callback(register_module_forward_pre_hook(recorder.before_forward).remove)
        stack.callback(register_module_forward_hook(recorder.after_forward, always_call=True).remove)
        stack.callback(register_optimizer_step_post_hook(recorder.after_step).remove)
        try:
            yield
        finally:
            _save(recorder.steps, folder / f"rank-{rank}.pt")


@torch.no_grad()
def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers of a tensor, which differ where it does."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    flat = dense.detach().reshape(-1).to("cpu", torch.float64)
    if len(flat) <= _MOST_NUMBERS:
        return flat.clone()
    return torch.cat([flat[:: -(-len(flat) // _MOST_NUMBERS)], flat.mean().view(1)])


def _double(item: Any) -> Any:
    """Return an item with all its numbers in double precision."""
    if isinstance(item, torch.Tensor):
        return item.double() if item.is_floating_point() else item
    if isinstance(item, np.ndarray):
        return item.astype(np.float64) if item.dtype.kind == "f" else item
    if type(item) is dict:
        return {key: _double(each) for key, each in item.items()}
    return type(item)(map(_double, item)) if type(item) in {list, tuple} else item


# ---- what is compared ----


@dataclass(frozen=True)
class _Ran:
    """What one run did.

    Attributes:
        code: The exit code.
        lines: What it printed, by the line's number.
        errors: The end of what it wrote to stderr.
        steps: What each rank recorded of each step.
        files: What the first rank wrote, by its path.
        off: What was switched off.
    """

    code: int
    lines: dict[int, str]
    errors: list[str]
    steps: list[list[dict[str, Any]]]
    files: dict[str, str]
    off: list[str]


def check(ranks: int, target: str, arguments: Sequence[str]) -> int:
    """Compare, print a table, and return the exit code: 0 if the ranks do the same as one.

    Args:
        ranks: How many ranks to compare with one.
        target: What the script is called.
        arguments: Those of ``ddp-patch run``.
    """
    arguments = ["--seed", str(secrets.randbelow(2**31)), *arguments]  # of which the last one counts
    precision, found = "double", list[_Ran]()
    with tempfile.TemporaryDirectory(prefix="ddp_patch-") as folder:
        while len(found) < 3:
            number, on = len(found) + 1, ranks if len(found) == 2 else 1
            sys.stderr.write(f"ddp_patch: checking {target}, run {number} of 3, in {precision} precision\n")
            ran = _ran(Path(folder, f"{number}-{precision}"), on, arguments)
            if not ran.code:
                found.append(ran)
            elif number == 1 and precision == "double":
                precision = "single"  # of which it may have numbers of its own
            else:
                return _told([f"It fails on {counted(on, 'rank')}, by exit code {ran.code}:", *ran.errors], 1)
    return _judged(ranks, *found)


def _ran(folder: Path, ranks: int, arguments: Sequence[str]) -> _Ran:
    """Run the script once."""
    folder.mkdir()
    with made_equal(folder / "files"):  # so that a single rank needs no launcher
        done = subprocess.run(  # noqa: S603 - this very command
            [sys.executable, "-m", "ddp_patch", "run", *arguments],
            env={**os.environ, RECORDING: str(folder), **(ALONE if ranks == 1 else {})},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    recorded = [folder / f"rank-{rank}.pt" for rank in range(ranks)]
    steps = [torch.load(each, weights_only=True) for each in recorded if each.exists()]
    home = folder / "files" / "rank-0" / "files"
    paths = [path for path in sorted(home.rglob("*")) if path.is_file()]
    found = {str(each): _text_of(path) for path in paths if _is_result(each := path.relative_to(home))}
    off = sorted(each.name.removeprefix("off ") for each in folder.glob("off *"))
    lines = dict(enumerate(done.stdout.splitlines()))
    return _Ran(done.returncode, lines, done.stderr.splitlines()[-_LAST_LINES:], steps, found, off)


def _is_result(path: Path) -> bool:
    """Return whether a file is in the current folder, or at least no temporary one; and in no hidden folder."""
    whole, here = Path(os.sep, path), Path.cwd()
    if whole.is_relative_to(here):
        whole = whole.relative_to(here)
    elif whole.is_relative_to(os.path.realpath(tempfile.gettempdir())):
        return False
    return not any(folder.startswith(".") for folder in whole.parts[:-1])


def _judged(ranks: int, one: _Ran, again: _Ran, many: _Ran) -> int:
    """Print what was found, and return the exit code."""
    if not one.steps or not one.steps[0]:
        return _told(["No optimizer of torch.optim made a step on several ranks as one, so nothing was compared."], 1)
    double = all(step["is_double"] for step in one.steps[0])  # a script may ask for another one itself
    differs_at, steps = _difference(one, many, _CLOSE[double])
    lines = _texts_apart(one.lines, again.lines, many.lines)
    files = _texts_apart(one.files, again.files, many.files)
    off, precision = many.off, "double" if double else "single"
    without = f"without {', '.join(off)}" if off else "steps"
    printed = f"differ, first {lines[0][1]!r} and {lines[0][2]!r}" if lines else f"the same, {len(one.lines)}"
    written = f"differ, first /{files[0][0]}" if files else f"the same, {len(one.files)}"
    rows = [
        f"{without}: {steps}, in {precision} precision",
        f"printed lines: {printed}{'' if lines else ' in these steps'}",
        f"files: {written}{'' if files else ' in these steps'}",
    ]
    why = _why_not(ranks, differs_at, one, many, lines, files)
    within = "" if double else f", within {_CLOSE[double]:g} in single precision"
    same = f"The same{' but for ' if off else ''}{', '.join(off)}{within}."
    verdict = f"Not the same. {why}" if why else same
    return _told([*rows, verdict], int(bool(why)))


def _why_not(ranks: int, differs_at: int, one: _Ran, many: _Ran, lines: object, files: object) -> str:
    """Return the likely reason why the ranks do not do the same, or nothing."""
    of_one, of_many = one.steps[0], many.steps
    if differs_at > min(len(of_one), len(of_many[0])):
        made = counted(len(of_one), "step")
        return f"One rank made {made}, and {ranks} ranks {len(of_many[0])}: they went different ways."
    if differs_at:
        return (
            "Is a number drawn from what differs between the ranks (a clock, the process's number, a generator that "
            "nobody has seeded), or a batch made of it?"
        )
    if lines:
        return "What it prints differs."
    return "It writes other files." if files else ""


def _difference(one: _Ran, many: _Ran, close: float) -> tuple[int, str]:
    """Compare the parameters and gradients of two runs, as parts of the largest one.

    Returns:
        The step from which on they are further apart than is close, from 1, or 0 if there is none; and what was found.
    """
    first, largest, worst = 0, 0.0, "the number of steps"
    for step, (a, b) in enumerate(zip(one.steps[0], many.steps[0], strict=False), 1):
        for kind in ("gradients", "parameters"):
            finite = (each[each.isfinite()] for each in a[kind].values())
            scale = max([float(each.abs().max()) for each in finite if each.numel()], default=1.0) or 1.0
            for name in sorted(a[kind].keys() | b[kind].keys()):
                size = _size(a[kind].get(name), b[kind].get(name)) / scale
                largest = max(largest, size)
                if size > close and not first:
                    first, worst = step, name
    if not first and len(one.steps[0]) != len(many.steps[0]):
        first = min(len(one.steps[0]), len(many.steps[0])) + 1
    if not first:
        return 0, f"the same in {counted(len(one.steps[0]), 'step')}; {largest:.1e} apart at most"
    return first, f"differs from step {first} on, first in {worst}; by {largest:.1e} at most"


def _size(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return the largest difference of two tensors; infinity if one is missing, or holds no number elsewhere."""
    if a is None or b is None or a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    return float((a - b)[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0


def _texts_apart(one: Any, again: Any, many: Any) -> list[tuple[Any, str | None, str | None]]:
    """Return what differs of the texts of one rank and of several, but for what differs by itself, such as times."""
    varying = {_but_for_numbers(each) for each in {*one, *again} if not _alike(one.get(each), again.get(each))}
    compared = sorted(each for each in {*one, *many} if _but_for_numbers(each) not in varying)
    pairs = [(each, one.get(each), many.get(each)) for each in compared]
    return [(each, mine, other) for each, mine, other in pairs if not _alike(mine, other)]


def _but_for_numbers(name: str | int) -> str | int:
    """Return a file's path without numbers, which may be times; a line's number as it is."""
    return _NUMBER.sub("#", name) if isinstance(name, str) else name


def _alike(a: str | None, b: str | None) -> bool:
    """Return whether two texts are the same but for the roundings of their numbers."""
    if a is None or b is None:
        return a is b
    numbers = [list(map(float, _NUMBER.findall(text))) for text in (a, b)]
    if _NUMBER.sub("", a) != _NUMBER.sub("", b) or len(numbers[0]) != len(numbers[1]):
        return False
    return all(math.isclose(x, y, rel_tol=_CLOSE_TEXT, abs_tol=_CLOSE_TEXT**2) for x, y in zip(*numbers, strict=True))


def _text_of(path: Path) -> str:
    """Return what a file says; of one that is no text, how long it is."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return f"{path.stat().st_size} bytes"


def _told(lines: Sequence[str], code: int) -> int:
    """Print what was found on stdout."""
    for line in lines:
        print(textwrap.fill(line, 100, subsequent_indent="    "))
    return code
