"""Run a script's first steps on one rank and on several, and say whether they do the same: ``ddp-patch run --check``.

It runs three times, with all switched off that ranks draw for themselves: on one rank; again, which shows what it
prints and writes otherwise by itself; and on several ranks. Each rank records what it trains. No run writes into the
user's folders.
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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_patch.compat.private_torch import items_changed
from ddp_patch.orders.random_states import GlobalState
from ddp_patch.running.launch import ALONE, SEED, made_equal
from ddp_patch.running.lockstep import models_of
from ddp_patch.running.overlay import open_file
from ddp_patch.validation import counted

__all__ = ["Recording", "check", "recorded"]

_READS = re.compile(r"^ddp_patch: (What is read at .*)", re.MULTILINE)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_CLOSE_TEXT = 1e-3  # of a number that is printed, and rounded for that
_CLOSE = {True: 1e-8, False: 1e-3}  # how far apart steps may be, in double precision and in single
_LAST_LINES = 12
_NAME = "DDP_PATCH_RECORDING"
_MOST_NUMBERS = 2**14  # of each tensor; of larger ones, so many at equal distances, and the mean of all
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_BATCH_NORM = "batch normalisation"
_save = torch.save


# ---- what each rank records ----


@dataclass(frozen=True)
class Recording:
    """What to record.

    Attributes:
        folder: Where each rank writes it.
        ranks: How many ranks there are.
        steps: How many steps of optimizers.
        double: Whether all is computed in double precision.
    """

    folder: Path
    ranks: int
    steps: int
    double: bool

    @property
    def environment(self) -> dict[str, str]:
        """What tells a process of it."""
        return {_NAME: json.dumps(asdict(self) | {"folder": str(self.folder)})}

    @property
    def files(self) -> Path:
        """Where the ranks write their files."""
        return self.folder / "files"

    @classmethod
    def here(cls) -> "Recording | None":
        """Return what this process was told."""
        told = json.loads(os.environ.get(_NAME, "null"))
        return told and cls(**{**told, "folder": Path(told["folder"])})


_ATTEND, _AUTOCAST = functional.scaled_dot_product_attention, torch.autocast.__init__


class _Recorder:
    """Records the first steps of a script, with all still that ranks draw for themselves, and ends it then.

    What it stands in the place of, it writes down: what is random, and what sees the whole batch.

    Args:
        what: What to record.

    Attributes:
        steps: What each step of an optimizer did: ``losses`` (the roots of the calls of ``backward()`` before it, as
            they were weighed), ``has_drawn`` (whether the global generator moved since the step before),
            ``is_double`` (whether all parameters are of double precision), ``gradients`` that the optimizer got, by the
            parameters' names, and ``parameters``: what it made of them.
    """

    def __init__(self, what: Recording) -> None:
        self.steps: list[dict[str, Any]] = []
        self._what = what
        self._losses: list[float] = []
        self._names: dict[torch.Tensor, str] = {}
        self._random = torch.Tensor()

    def note_losses(self, run: Callable[..., None], tensors: Any, *args: Any, **options: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        self._losses += [float(root) for root in roots if isinstance(root, torch.Tensor) and root.numel() == 1]
        run(tensors, *args, **options)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if not all(each in self._names for each in parameters):
            named = (pair for model in models_of(parameters) for pair in model.named_parameters())
            self._names |= {each: f"parameter {number}" for number, each in enumerate(parameters, len(self._names))}
            self._names |= {each: name for name, each in named}
        given = {self._names[each]: each.grad for each in parameters if each.grad is not None}
        self.steps.append(
            {
                "losses": self._losses,
                "is_double": all(each.dtype == torch.float64 for each in parameters),
                "has_drawn": bool(self.steps) and not torch.equal(torch.get_rng_state(), self._random),
                "gradients": {name: _sample(each) for name, each in given.items()},
            }
        )
        self._losses = []

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.steps[-1]["parameters"] = {self._names[each]: _sample(each) for each in parameters}
        self._random = torch.get_rng_state()
        if len(self.steps) >= self._what.steps:
            sys.exit()

    def hold_still(self, stack: ExitStack, *, sync_batchnorm: bool) -> None:
        """Stand in the place of what is random, until the stack closes."""

        def in_one_precision(context: Any, device_type: str, *args: Any, **options: Any) -> None:
            if options.get("enabled", True):
                self._off("autocast")
            _AUTOCAST(context, device_type, *args, **{**options, "enabled": False})

        for name in _DROPOUTS if sync_batchnorm else (*_DROPOUTS, "batch_norm"):
            stack.enter_context(patch.object(functional, name, self._evaluating(getattr(functional, name))))
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", self.attend))
        stack.enter_context(patch.object(torch.autocast, "__init__", in_one_precision))
        for name, value in (("randn_like", 0.0), ("rand_like", 0.5)):
            stack.enter_context(patch.object(torch, name, partial(self.draw, value)))
        stack.callback(register_module_forward_pre_hook(self.before_forward).remove)
        change = _double if self._what.double else lambda item: item
        stack.enter_context(items_changed(self.item, change))

    def _off(self, name: str) -> None:
        with open_file(self._what.folder / f"off {name}", "w"):  # past what lies over the file system
            pass

    def _evaluating(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does in training what it does in evaluation."""
        takes = signature(function)

        def call(*args: Any, **options: Any) -> Any:
            bound = takes.bind(*args, **options)
            bound.apply_defaults()
            given = bound.arguments
            if given["training"] and given.get("p", 1):
                self._off("dropout" if "p" in given else _BATCH_NORM)
                given["training"] = given.get("running_mean", 0) is None  # then there is nothing but the batch
            return function(*bound.args, **bound.kwargs)

        return call

    def attend(
        self, query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, *args: Any, **options: Any
    ) -> Any:
        if dropout_p:
            self._off("dropout")
        return _ATTEND(query, key, value, options.pop("attn_mask", mask), 0.0, *args, **options)

    def draw(self, value: float, data: torch.Tensor, **options: Any) -> torch.Tensor:
        self._off("noise")
        return torch.full_like(data, value, **options)

    def before_forward(self, module: nn.Module, _args: Any) -> None:
        if isinstance(module, nn.RNNBase) and module.training and module.dropout:
            self._off("dropout")
            module.dropout = 0.0

    def item(self, dataset: Any, index: Any) -> Any:
        """Return an item of a dataset, whose random numbers follow from its index."""
        before, own = GlobalState.capture(), GlobalState.seeded(np.random.SeedSequence(crc32(repr(index).encode())))
        seeded = own.copied().values()
        own.install()
        try:
            return dataset[index]
        finally:
            if GlobalState.capture().values() != seeded:
                self._off("random transforms")
            before.install()


@contextmanager
def recorded(what: Recording, rank: int, *, sync_batchnorm: bool) -> Iterator[None]:
    """Record a script while entered, and end it by ``sys.exit()`` after its first steps.

    Args:
        what: What to record.
        rank: This rank.
        sync_batchnorm: Whether batch normalisation sees the whole batch; else it is switched off.
    """
    recorder = _Recorder(what)
    what.folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        recorder.hold_still(stack, sync_batchnorm=sync_batchnorm)
        if what.double:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        noting = partial(recorder.note_losses, torch.autograd.backward)
        stack.enter_context(patch.object(torch.autograd, "backward", noting))
        stack.callback(register_optimizer_step_pre_hook(recorder.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(recorder.after_step).remove)
        try:
            yield
        finally:
            _save(recorder.steps, what.folder / f"rank-{rank}.pt")


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
        reads: What it said there of a number that its ranks do not read alike; empty if nothing.
        steps: What each rank recorded of each step.
        files: What the first rank wrote, by its path.
        off: What was switched off.
    """

    code: int
    lines: dict[int, str]
    errors: list[str]
    reads: str
    steps: list[list[dict[str, Any]]]
    files: dict[str, str]
    off: list[str]


def check(ranks: int, steps: int, target: str, arguments: Sequence[str]) -> int:
    """Compare, print a table, and return the exit code: 0 if the ranks do the same as one.

    Args:
        ranks: How many ranks to compare with one.
        steps: How many steps of optimizers.
        target: What the script is called.
        arguments: Those of ``ddp-patch run``.
    """
    os.environ.setdefault(SEED, str(secrets.randbelow(2**31)))
    with tempfile.TemporaryDirectory(prefix="ddp_patch-") as folder:

        def run(number: int, on: int, *, double: bool) -> _Ran:
            precision = "double" if double else "single"
            sys.stderr.write(f"ddp_patch: checking {target}, run {number} of 3, in {precision} precision\n")
            return _ran(Recording(Path(folder, f"{number}-{precision}"), on, steps, double), arguments)

        double, one = True, run(1, 1, double=True)
        if one.code:  # it has numbers of single precision of its own
            double, one = False, run(1, 1, double=False)
        again, many = (one, one) if one.code else (run(2, 1, double=double), run(3, ranks, double=double))
        for failed, of in ((one, "1 rank"), (again, "1 rank"), (many, f"{ranks} ranks")):
            if failed.code:
                return _told([f"It fails on {of}, by exit code {failed.code}:", *failed.errors], 1)
        return _judged(ranks, one, again, many)


def _ran(what: Recording, arguments: Sequence[str]) -> _Ran:
    """Run the script once."""
    command, alone = [sys.executable, "-m", "ddp_patch", "run", *arguments], ALONE if what.ranks == 1 else {}
    with made_equal(what.files):  # so that a single rank needs no launcher
        done = subprocess.run(  # noqa: S603 - this very command
            command,
            env={**os.environ, **what.environment, **alone},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    recorded = [what.folder / f"rank-{rank}.pt" for rank in range(what.ranks)]
    steps = [torch.load(each, weights_only=True) for each in recorded if each.exists()]
    home = what.files / "rank-0"
    paths = [path for path in sorted(home.rglob("*")) if path.is_file()]
    found = {str(each): _text_of(path) for path in paths if not _is_aside(each := path.relative_to(home))}
    off = sorted(each.name.removeprefix("off ") for each in what.folder.glob("off *"))
    lines = dict(enumerate(done.stdout.splitlines()))
    errors, reads = done.stderr.splitlines(), _READS.search(done.stderr)
    return _Ran(done.returncode, lines, errors[-_LAST_LINES:], "" if reads is None else reads[1], steps, found, off)


def _is_aside(path: Path) -> bool:
    """Return whether a file is none of the script's results: a temporary one, or one in a hidden folder of the home.

    Where the script runs in such a folder itself, its files there are results.
    """
    home, temporary = (Path(os.path.realpath(each)) for each in (os.path.expanduser("~"), tempfile.gettempdir()))
    whole, here = Path(os.sep, path), Path.cwd()
    aside = [temporary] if whole.is_relative_to(temporary) else []
    if whole.is_relative_to(home) and len(below := whole.relative_to(home).parts) > 1 and below[0].startswith("."):
        aside.append(home / below[0])
    return any(not (here.is_relative_to(each) and whole.is_relative_to(here)) for each in aside)


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
    if not why and _BATCH_NORM in off:
        why = "Batch normalisation sees a part of each batch. --sync-batchnorm helps on accelerators."
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
        at = differs_at - 1
        loss = torch.tensor([sum(of_one[at]["losses"]), sum(sum(each[at]["losses"]) for each in of_many) / ranks])
        later = [step["has_drawn"] for step in of_one[2:]]  # a rank begins to draw its own after the first
        if 2 * sum(later) > len(later):
            return "The script draws random numbers between its steps, which --check cannot switch off."
        if not torch.isclose(loss[0], loss[1], rtol=1e-5, atol=1e-8):
            return (
                f"The parts' losses have the mean {loss[1]:.6g}, and the whole batch's loss is {loss[0]:.6g}: it is a "
                "loss of the whole batch (samples compared with each other, weights of classes, a ratio of sums), or a "
                "batch is made otherwise of fewer samples (padding, a set's order)."
            )
        return "The losses are the same, their gradients are not: is a gradient made or changed beside backward()?"
    if lines:
        return "What it prints differs: is it a number of a part of a batch?"
    return "It writes other files." if files else many.reads


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
