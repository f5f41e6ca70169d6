"""Run a script's first steps on one rank and on several, and say whether they do the same: ``ddp-patch run --check``.

It runs five times: on one rank; again, with gradients that differ by about a rounding, which shows what varies by
itself; on several ranks; and on one and on several with all standing still that ranks draw for themselves. No run
writes into the user's folders.
"""

import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ddp_patch.running.launch import ALONE, SEED, made_equal
from ddp_patch.running.recording import BATCH_NORM, Recording

__all__ = ["check"]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_CLOSE_TEXT = 1e-3  # of a number that is printed, and rounded for that
# How far apart steps may be: in double precision; else, and as many times as far as a rounding takes one rank.
_CLOSE_DOUBLE, _CLOSE, _ROUNDINGS = 1e-8, 1e-5, 30
_LOST = 1e-2  # where a rounding makes as much, nothing can be compared
_LAST_LINES = 12
_Files: TypeAlias = dict[str, str]
# How far apart each parameter is, as a part of the largest one.
_Sizes: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class _Ran:
    """What one run did.

    Attributes:
        code: The exit code.
        lines: What it printed.
        errors: The end of what it wrote to stderr.
        steps: What each rank recorded of each step.
        files: What the first rank wrote, by its path.
        off: What was switched off.
    """

    code: int
    lines: list[str]
    errors: list[str]
    steps: list[list[dict[str, Any]]]
    files: _Files
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

        def run(number: int, on: int, **how: bool) -> _Ran:
            text = f"{on} rank{'s' * (on > 1)}{''.join(f', {name}' for name, is_so in how.items() if is_so)}"
            sys.stderr.write(f"ddp_patch: checking {target}, run {number} of 5: {text}\n")
            return _ran(Recording(Path(folder, f"{number}-{how.get('double')}"), on, steps, **how), arguments)

        one, again, many = run(1, 1), run(2, 1, nudged=True), run(3, ranks)
        for failed, of in ((one, 1), (again, 1), (many, ranks)):
            if failed.code:
                return _told([f"It fails on {of} rank{'s' * (of > 1)}, by exit code {failed.code}:", *failed.errors], 1)
        still = run(4, 1, still=True, double=True)
        double = not still.code
        still = still if double else run(4, 1, still=True)
        return _judged(ranks, (one, again, many), (still, run(5, ranks, still=True, double=double)), double=double)


def _ran(what: Recording, arguments: Sequence[str]) -> _Ran:
    """Run the script once."""
    command, alone = [sys.executable, "-m", "ddp_patch", "run", *arguments], ALONE if what.ranks == 1 else {}
    with made_equal(what.folder / "files"):  # so that a single rank needs no launcher
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
    home = what.folder / "files" / "rank-0"
    found = {str(path.relative_to(home)): _text_of(path) for path in sorted(home.rglob("*")) if path.is_file()}
    off = sorted(each.name.removeprefix("off ") for each in what.folder.glob("off *"))
    return _Ran(done.returncode, done.stdout.splitlines(), done.stderr.splitlines()[-_LAST_LINES:], steps, found, off)


def _judged(ranks: int, as_it_is: tuple[_Ran, _Ran, _Ran], still: tuple[_Ran, _Ran], *, double: bool) -> int:
    """Print what was found, and return the exit code."""
    one, again, many = as_it_is
    if still[0].code or still[1].code:
        errors = still[0].errors if still[0].code else still[1].errors
        return _told(["It cannot be run with what is random switched off:", *errors], 1)
    if not one.steps or not one.steps[0]:
        return _told(["No optimizer of torch.optim made a step on several ranks as one, so nothing was compared."], 1)
    allowed = _allowed(_apart(one, again))
    seen, seen_text = _difference(one, many, allowed, _CLOSE)
    exactly: list[_Sizes] = [{} for _ in still[0].steps[0]]
    quiet, quiet_text = _difference(*still, *((exactly, _CLOSE_DOUBLE) if double else (allowed, _CLOSE)))
    lines = _lines_apart(one.lines, again.lines, still[0].lines, still[1].lines)
    files = _files_apart(one.files, again.files, still[0].files, still[1].files)
    off, precision = still[1].off, "double" if double else "single"
    rows = {
        "as it is": seen_text,
        f"without {', '.join(off)}" if off else "once more": f"{quiet_text}, in {precision} precision",
        "printed lines": f"differ, first {lines[0]}" if lines else f"the same, {len(still[0].lines)} in these steps",
        "files": f"differ, first {files[0]}" if files else f"the same, {len(still[0].files)} in these steps",
    }
    why = _why_not(ranks, quiet, still, lines, files)
    if not why and seen and BATCH_NORM in off:
        why = "Batch normalisation sees a part of each batch. --sync-batchnorm helps on accelerators."
    last, compared, more = allowed[-1], _compared(allowed), ""
    if compared < len(allowed):
        more = f" From step {compared + 1} on, roundings alone are larger."
    elif lost := sum(size > _LOST for size in last.values()):
        more = f" Roundings alone move {lost} of {len(last)} parameters by more, which were not compared."
    verdict = f"Not the same. {why}" if why else f"The same.{more}"
    if not why and seen:
        verdict = f"The same but for {', '.join(off) or 'roundings in single precision'}.{more}"
    return _told([*(f"{name}: {found}" for name, found in rows.items()), verdict], int(bool(why)))


def _why_not(ranks: int, quiet: int, still: tuple[_Ran, _Ran], lines: list[str], files: list[str]) -> str:
    """Return the likely reason why the ranks do not do the same, with what is random switched off; or nothing."""
    of_one, of_many = still[0].steps[0], still[1].steps
    if quiet > min(len(of_one), len(of_many[0])):
        return f"One rank made {len(of_one)} steps, and {ranks} ranks {len(of_many[0])}: they went different ways."
    if quiet:
        at = quiet - 1
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
    return "It writes other files." if files else ""


def _apart(one: _Ran, other: _Ran) -> list[_Sizes]:
    """Return for each step that both made how far apart each parameter, or its gradient, is."""
    found = []
    for a, b in zip(one.steps[0], other.steps[0], strict=False):
        sizes: _Sizes = {}
        for kind in ("gradients", "parameters"):
            scale = max([float(each.abs().max()) for each in a[kind].values() if each.numel()], default=1.0) or 1.0
            for name in a[kind].keys() | b[kind].keys():
                size = _size(a[kind].get(name), b[kind].get(name)) / scale
                sizes[name] = max(sizes.get(name, 0.0), size)
        found.append(sizes)
    return found


def _allowed(rounding: Sequence[_Sizes]) -> list[_Sizes]:
    """Return how far apart each parameter may be in each step, by how far a rounding has moved it until then."""
    allowed: list[_Sizes] = []
    for sizes in rounding:
        before = allowed[-1] if allowed else {}
        allowed.append({name: max(_CLOSE, _ROUNDINGS * size, before.get(name, 0.0)) for name, size in sizes.items()})
    return allowed


def _size(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Return the largest difference of two tensors; infinity if one is missing, or holds no number elsewhere."""
    if a is None or b is None or a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    return float((a - b)[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0


def _difference(one: _Ran, many: _Ran, allowed: Sequence[_Sizes], otherwise: float) -> tuple[int, str]:
    """Compare two runs, each parameter as long as a rounding moves it by less than what is looked for.

    Args:
        one: One run.
        many: The other.
        allowed: How far apart parameters may be in each step.
        otherwise: How far those may be that are not in it.

    Returns:
        The step from which on more than rounding differs, from 1, or 0 if there is none; and what was found, in words.
    """
    compared = _compared(allowed)
    first, largest, worst = None, 0.0, "the number of steps"
    apart = _apart(one, many)[:compared]
    for at, (sizes, most) in enumerate(zip(apart, allowed, strict=False)):
        known = {name: size for name, size in sizes.items() if most.get(name, otherwise) <= _LOST}
        largest = max([largest, *known.values()])
        wrong = {name: size for name, size in known.items() if size > most.get(name, otherwise)}
        if first is None and wrong:
            first, worst = at, max(wrong, key=lambda name: wrong[name])
    if first is None and len(one.steps[0]) != len(many.steps[0]) and len(apart) < compared:
        first = len(apart)
    if first is None:
        return 0, f"the same in {compared} steps; {largest:.1e} apart at most"
    return first + 1, f"differs from step {first + 1} on, first in {worst}; by {largest:.1e} at most"


def _compared(allowed: Sequence[_Sizes]) -> int:
    """Return how many steps can be compared, before roundings alone move each parameter too far."""
    is_lost = (bool(sizes) and min(sizes.values()) > _LOST for sizes in allowed)
    return next((at for at, each in enumerate(is_lost) if each), len(allowed))


def _lines_apart(one: list[str], again: list[str], a: list[str], b: list[str]) -> list[str]:
    """Return the lines that differ, but for those that differ between two runs on one rank, such as times."""
    varying = {number for number, pair in enumerate(zip_longest(one, again)) if not _alike(*pair)}
    pairs = enumerate(zip_longest(a, b))
    return [f"{mine!r} and {other!r}" for n, (mine, other) in pairs if n not in varying and not _alike(mine, other)]


def _files_apart(one: _Files, again: _Files, a: _Files, b: _Files) -> list[str]:
    """Return the files that differ, but for those that differ between two runs on one rank; of bytes, the lengths."""
    varying = {name for name in one.keys() | again.keys() if not _alike(one.get(name), again.get(name))}
    return sorted(f"/{name}" for name in (a.keys() | b.keys()) - varying if not _alike(a.get(name), b.get(name)))


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
