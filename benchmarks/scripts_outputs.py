"""Tells what a script left, as lines of text, and where two runs of it differ."""

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch.utils._pytree import tree_flatten_with_path

NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")
CLOCK = re.compile(
    r"(\d{2,4}[-_]){2}\d{2}[-_T]+\d{2}[-_:]\d{2}[-_:]\d{2}|\d{2}h_\d{2}m_\d{2}s|\d{6,}|[0-9a-f]{8,}|tmp\w{8}|(?<=\.)\d+\.\d+$"
)
TIMES = re.compile(
    r"\d+(?::\d{2})+(?:\.\d+)?|[\d.]+ ?(?:it/s|s/it|/s|ms|s|secs?|seconds|mins?|minutes)\b|ms/batch +[\d.]+"
    r"|[Tt]ime[^\d\n]{0,12}[\d.]+(?: *\( *[\d.]+\))?"
)
PICTURES = {".png", ".jpg", ".jpeg"}
LEFT_OUT = {"__pycache__", ".git", "wandb", "mlruns"}


@dataclass(frozen=True)
class Left:
    """What a run left.

    Attributes:
        lines: By the name of a file, or "" for what was printed: its lines, each of which is split at its numbers.
    """

    lines: Mapping[str, list[list[str]]]


def left(printed: str, folder: Path, before: Mapping[str, bytes]) -> Left:
    """Return what a run printed and which files it wrote, other than those that were there before."""
    told = {"": split(printed)}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        parts = set(path.relative_to(folder).parts)
        hidden = any(part.startswith(".") for part in parts) or parts & LEFT_OUT
        if hidden or not path.is_file() or before.get(name) == digest(path):
            continue
        told[name] = split("\n".join(content(path)))
    return Left(told)


def digest(path: Path) -> bytes:
    """Return what tells a file from another one."""
    import hashlib

    return hashlib.sha256(path.read_bytes()).digest()


def split(text: str) -> list[list[str]]:
    """Split lines at their numbers, without times; what a line says before it begins anew counts as a line."""
    text = TIMES.sub("time", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    return [re.split(f"({NUMBER.pattern})", re.sub(r"0x[0-9a-f]+", "0x", line)) for line in lines if line]


def content(path: Path) -> Iterator[str]:
    """Tell a file: tensors by their norms, pictures by their means, what is no text by its length."""
    try:
        if "tfevents" in path.name:
            yield from events(path)
        elif path.suffix == ".npy":
            yield from tensors(torch.from_numpy(np.load(path)))
        elif path.suffix in PICTURES:
            pixels = np.asarray(Image.open(path).convert("RGB"), dtype=float)
            yield f"{pixels.shape} {pixels.mean():.2f} {pixels.std():.2f}"
        elif path.read_bytes()[:2] == b"PK":
            yield from tensors(torch.load(path, weights_only=False, map_location="cpu"))
        else:
            yield from path.read_text(encoding="utf-8").splitlines()
    except (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError):
        yield f"{path.stat().st_size >> 10} KiB"


def events(path: Path) -> Iterator[str]:
    """Tell what TensorBoard would show."""
    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            yield f"{value.tag} {event.step} {value.simple_value:.6g}"


def tensors(tree: object) -> Iterator[str]:
    """Tell each tensor and each number of what was saved."""
    for path, leaf in tree_flatten_with_path(tree)[0]:
        name = "".join(map(str, path))
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            values = leaf.detach().double().flatten()
            ordered = values @ torch.linspace(1, 2, len(values), dtype=torch.float64)
            yield f"{name}: {values.norm():.6g} {ordered:.6g} of {tuple(leaf.shape)}"
        elif isinstance(leaf, (int, float, str)):
            yield f"{name}: {leaf}"


def named(left: Left) -> dict[str, list[list[str]]]:
    """Return files by names without what a clock or a random name puts in them."""
    return {CLOCK.sub("#", name): lines for name, lines in left.lines.items()}


def varying(one: Left, again: Left) -> set[tuple[str, int, int]]:
    """Return the places (file, line, part) that differ between two runs of one process; -1 stands for all."""
    a, b = named(one), named(again)
    found = {(name, -1, -1) for name in a.keys() ^ b.keys()}
    for name in a.keys() & b.keys():
        found |= set(differences(name, a[name], b[name], close=0.0))
    return found


def differences(name: str, a: list[list[str]], b: list[list[str]], close: float) -> Iterator[tuple[str, int, int]]:
    """Yield the places where the lines of a file differ."""
    if len(a) != len(b):
        yield name, -1, -1
        return
    for number, (mine, theirs) in enumerate(zip(a, b, strict=True)):
        if len(mine) != len(theirs):
            yield name, number, -1
            continue
        for place, pair in enumerate(zip(mine, theirs, strict=True)):
            if not alike(*pair, close=close):
                yield name, number, place


def alike(a: str, b: str, close: float) -> bool:
    """Return whether two parts of a line say the same, but for a rounding of the last digit."""
    if a == b:
        return True
    if not (NUMBER.fullmatch(a) and NUMBER.fullmatch(b)) or not close:
        return False
    digits = max(len(each.partition(".")[2].partition("e")[0].partition("E")[0]) for each in (a, b))
    scale = 10.0 ** int((re.search(r"[eE]([-+]?\d+)", a) or re.search("()", a)).group(1) or 0)
    last = 1.01 * 10.0**-digits * scale if "." in a else 0.0
    return math.isclose(float(a), float(b), rel_tol=close, abs_tol=max(last, close * 1e-3))


def told_apart(one: Left, many: Left, but: set[tuple[str, int, int]], close: float) -> list[str]:
    """Return where two runs differ, as ``file:line: this, not that``."""
    a, b = named(one), named(many)
    found = [f"{name}: is there in one of them only" for name in a.keys() ^ b.keys() if (name, -1, -1) not in but]
    for name in a.keys() & b.keys():
        for place in differences(name, a[name], b[name], close=close):
            whole = {(name, -1, -1), (name, place[1], -1), place}
            if whole & but:
                continue
            line = place[1]
            texts = ["".join(x[line]) if 0 <= line < len(x) else f"{len(x)} lines" for x in (b[name], a[name])]
            found.append(f"{name or 'printed'}:{line + 1}: {texts[0][:150]!r}, not {texts[1][:150]!r}")
    return list(dict.fromkeys(found))


def fresh(template: Path, target: Path) -> None:
    """Lay a folder anew."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(template, target, symlinks=True)
