"""Run a script's first steps on one rank and on several, and say whether they do the same: ``ddp-patch run --check``.

It runs three times, with all held still that ranks draw for themselves: on one rank; again, which shows what it prints
and writes otherwise by itself; and on several ranks. Each run records what it trains, and writes into a folder of its
own.
"""

import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
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
from ddp_patch.running.launch import alone
from ddp_patch.running.overlay import open_file
from ddp_patch.running.random_numbers import Still, eager
from ddp_patch.running.trees import fixed_weights
from ddp_patch.validation import counted

# The environment's name of the folder where the ranks of a run record what they do; its own name ends in the precision.
RECORDING = "DDP_PATCH_RECORDING"

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_CLOSE_TEXT = 1e-3  # of a number that is printed, and rounded for that
_CLOSE = {True: 1e-8, False: 1e-3}  # how far apart steps may be, in double precision and in single
_LAST_LINES = 12
_SAME = "The same but for dropout and noise."  # which are held still

# What a step of an optimizer did: two numbers for each parameter and for each gradient, by its name.
_Step: TypeAlias = dict[str, list[float]]


# ---- what each rank records ----


@contextmanager
def recorded(folder: Path, rank: int, steps: int) -> Iterator[None]:
    """Record a script while entered, with all still that ranks draw for themselves; end it after its first steps.

    Args:
        folder: Where the ranks record.
        rank: This rank.
        steps: How many steps of optimizers.
    """
    begin, made = torch.autocast.__init__, list[_Step]()
    names: dict[torch.Tensor, str] = {}

    def without_autocast(self: torch.autocast, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._enabled = False

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        step: _Step = {}
        for each in (each for group in optimizer.param_groups for each in group["params"]):
            name = names.setdefault(each, f"parameter {len(names)}")
            step[name] = _told_by(each)
            if each.grad is not None:
                step[f"the gradient of {name}"] = _told_by(each.grad)
        made.append(step)
        if len(made) >= steps:
            sys.exit()

    with ExitStack() as stack:
        stack.enter_context(eager())
        stack.enter_context(patch.object(torch.autocast, "__init__", without_autocast))
        is_double = folder.name.endswith("double")
        stack.enter_context(items_changed(_seeded_item, _double if is_double else lambda item: item))
        if is_double:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        _hold_still(names, stack)
        stack.callback(register_optimizer_step_post_hook(after_step).remove)
        try:
            yield
        finally:
            is_double = all(each.dtype == torch.float64 for each in names)  # a script may ask for one itself
            with open_file(folder / f"rank-{rank}.json", "w") as file:  # past what lies over the file system
                json.dump([is_double, made], file)


def _hold_still(names: dict[torch.Tensor, str], stack: ExitStack) -> None:
    """Hold still what modules draw, and note the names of their parameters, until the stack closes."""
    calls: list[Any] = []

    def before(module: nn.Module, _args: Any) -> None:
        for name, each in module.named_parameters():  # the outermost module is called first
            if isinstance(each, nn.Parameter):  # not what stands for one while calls are compared
                names.setdefault(each, name)
        calls.append(Still(lambda *_: None))
        calls[-1].__enter__()

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        calls.pop().__exit__(None, None, None)

    stack.callback(register_module_forward_pre_hook(before).remove)
    stack.callback(register_module_forward_hook(after, always_call=True).remove)


def _seeded_item(dataset: Any, index: Any) -> Any:
    """Return an item of a dataset, whose random numbers follow from its index."""
    before = GlobalState.capture()
    GlobalState.seeded(np.random.SeedSequence(crc32(repr(index).encode()))).install()
    try:
        return dataset[index]
    finally:
        before.install()


@torch.no_grad()
def _told_by(tensor: torch.Tensor) -> list[float]:
    """Return numbers that differ where a tensor does: a norm, and a sum that weighs each number otherwise."""
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).to(torch.float64)
    return [float(flat.norm()), float((flat * fixed_weights(flat)).sum())]


def _double(item: Any) -> Any:
    """Return an item with its tensors and arrays in double precision."""
    if isinstance(item, np.ndarray):
        return item.astype(np.float64) if item.dtype.kind == "f" else item
    if isinstance(item, torch.Tensor):
        return item.double() if item.is_floating_point() else item
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
        steps: What rank 0 recorded of each step.
        is_double: Whether it trains in double precision.
        files: What it wrote, by its path.
    """

    code: int
    lines: dict[int, str]
    errors: list[str]
    steps: list[_Step]
    is_double: bool
    files: dict[str, str]


def check(ranks: int, target: str, arguments: Sequence[str]) -> int:
    """Compare, print a table, and return the exit code: 0 if the ranks do the same as one.

    Args:
        ranks: How many ranks to compare with one.
        target: What the script is called.
        arguments: Those of ``ddp-patch run``.
    """
    precision, found = "double", list[_Ran]()
    with tempfile.TemporaryDirectory(prefix="ddp_patch-") as folder:
        # Of two seeds, the last one counts: the user's.
        arguments = ["--seed", str(secrets.randbelow(2**31)), *arguments]
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
    return _judged(*found)


def _ran(folder: Path, ranks: int, arguments: Sequence[str]) -> _Ran:
    """Run the script once."""
    folder.mkdir()
    with alone(folder) if ranks == 1 else nullcontext():  # a single rank needs no launcher
        done = subprocess.run(  # noqa: S603 - this very command
            [sys.executable, "-m", "ddp_patch", "run", *arguments],
            env={**os.environ, RECORDING: str(folder), "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    recorded = folder / "rank-0.json"
    is_double, steps = json.loads(recorded.read_text()) if recorded.exists() else (True, [])
    home = folder / "rank-0" / "files"
    paths = [path for path in sorted(home.rglob("*")) if path.is_file()]
    files = {str(each): _text_of(path) for path in paths if _is_result(each := path.relative_to(home))}
    lines = dict(enumerate(done.stdout.splitlines()))
    return _Ran(done.returncode, lines, done.stderr.splitlines()[-_LAST_LINES:], steps, is_double, files)


def _is_result(path: Path) -> bool:
    """Return whether a file is in the current folder, or at least no temporary one; and in no hidden folder."""
    whole, here = Path(os.sep, path), Path.cwd()
    if whole.is_relative_to(here):
        whole = whole.relative_to(here)
    elif whole.is_relative_to(os.path.realpath(tempfile.gettempdir())):
        return False
    return not any(folder.startswith(".") for folder in whole.parts[:-1])


def _judged(one: _Ran, again: _Ran, many: _Ran) -> int:
    """Print what was found, and return the exit code."""
    if not one.steps:
        return _told(["No optimizer of torch.optim made a step on several ranks as one, so nothing was compared."], 1)
    precision = "double" if one.is_double else "single"
    differs, steps = _difference(one.steps, many.steps, _CLOSE[one.is_double])
    lines = _texts_apart(one.lines, again.lines, many.lines)
    files = _texts_apart(one.files, again.files, many.files)
    printed = f"differ, first {lines[0][1]!r} and {lines[0][2]!r}" if lines else f"the same, {len(one.lines)}"
    written = f"differ, first /{files[0][0]}" if files else f"the same, {len(one.files)}"
    verdict = _SAME
    if differs or lines or files:
        verdict = (
            "Not the same. Does a number follow from what differs between the ranks: a clock, the process's number, a "
            "generator that nobody has seeded?"
        )
    rows = [
        f"steps: {steps}, in {precision} precision",
        f"printed lines: {printed}{'' if lines else ' in these steps'}",
        f"files: {written}{'' if files else ' in these steps'}",
        verdict,
    ]
    return _told(rows, int(verdict != _SAME))


def _difference(one: Sequence[_Step], many: Sequence[_Step], close: float) -> tuple[bool, str]:
    """Return whether two runs differ, by numbers as parts of the largest one of their step; and what was found."""
    largest = 0.0
    for step, (a, b) in enumerate(zip(one, many, strict=False), 1):
        scale = max((abs(x) for each in a.values() for x in each if math.isfinite(x)), default=0.0) or 1.0
        for name in sorted(a.keys() | b.keys()):
            far = max(map(_apart, a.get(name, [math.inf] * 2), b.get(name, [math.inf] * 2))) / scale
            largest = max(largest, far)
            if far > close:
                return True, f"differs from step {step} on, first in {name}, by {far:.1e}"
    if len(one) != len(many):
        return True, f"one rank made {counted(len(one), 'step')}, and several {len(many)}"
    return False, f"the same in {counted(len(one), 'step')}; {largest:.1e} apart at most"


def _apart(x: float, y: float) -> float:
    """Return how far two numbers are apart; infinity if only one is a number."""
    same = x == y or (math.isnan(x) and math.isnan(y))
    return 0.0 if same else abs(x - y) if math.isfinite(x - y) else math.inf


def _texts_apart(one: Any, again: Any, many: Any) -> list[tuple[Any, str | None, str | None]]:
    """Return what differs of the texts of one rank and of several, but for what differs by itself, such as times."""
    # A file's path may hold a time; a line is called by its number.
    of: Callable[[Any], Any] = lambda name: _NUMBER.sub("#", name) if isinstance(name, str) else name  # noqa: E731
    varying = {of(each) for each in {*one, *again} if not _alike(one.get(each), again.get(each))}
    pairs = [(each, one.get(each), many.get(each)) for each in sorted({*one, *many}) if of(each) not in varying]
    return [(each, mine, other) for each, mine, other in pairs if not _alike(mine, other)]


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
