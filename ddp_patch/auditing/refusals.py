"""Say in a few lines why an audit could not run: the error, and the line of the user's code that it comes from."""

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ddp_patch.auditing.sentences import sentence
from ddp_patch.errors import DDPPatchError, RanksFailedError
from ddp_patch.loaders.hooks import OURS

__all__ = ["refusal_text"]

_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = {"site-packages", "dist-packages"}
_Line: TypeAlias = tuple[str, int, str]  # a file, a line's number, and the function

_SECTION = re.compile(r'\nSee "\w+" in docs/errors\.md\.\Z')  # the last line of this package's own messages
_RANK = re.compile(r"^--- (rank \d+) (.+) ---$", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)


def refusal_text(error: BaseException, shows_traceback: bool = False) -> str:
    """Return an error's type, message and notes, where in the user's code it was raised, and where to look it up.

    Args:
        error: The error.
        shows_traceback: Whether to return the traceback instead, on lines of its own, from the user's code on.
    """
    if shows_traceback:
        return f"\n{_traceback(error)}"
    message = _message(error)
    section = _SECTION.search(message)
    message = _SECTION.sub("", message)
    place = _place(error)
    if isinstance(error, RanksFailedError):
        lines = _of_ranks(message)
    else:
        lines = [sentence(f"{type(error).__name__}: {message}" if message else type(error).__name__)]
    lines += [*map(sentence, getattr(error, "__notes__", [])), *place]
    if place or not isinstance(error, DDPPatchError) or isinstance(error, RanksFailedError):
        lines.append("Pass --traceback to see all of it.")
    return "\n".join(lines + ([section[0].strip()] if section else []))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # noqa: BLE001 - the user's own class
        return f"its message cannot be shown: its __str__ raised {type(other).__name__}"


def _traceback(error: BaseException) -> str:
    """Return the whole traceback but for this package's own lines, which led to the first one of the user's."""
    step = error.__traceback__
    while step is not None and not _is_users(step.tb_frame.f_code.co_filename):
        step = step.tb_next
    shown = traceback.format_exception(type(error), error, step or error.__traceback__)
    return "".join(shown).rstrip()


def _place(error: BaseException) -> list[str]:
    """Return in words the line of code that raised, if it is known."""
    if isinstance(error, SyntaxError) and error.filename:
        return [f"  {error.filename}:{error.lineno}: {(error.text or '').strip()}"]
    lines = [(frame.filename, frame.lineno or 0, frame.name) for frame in _frames(error)]
    return _innermost(lines, or_installed=not isinstance(error, DDPPatchError))


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Yield an error's lines from the innermost on, then those of the error that it came from."""
    seen: set[int] = set()
    other: BaseException | None = error
    while other is not None and id(other) not in seen:
        seen.add(id(other))
        yield from reversed(traceback.extract_tb(other.__traceback__))
        other = other.__cause__ or (None if other.__suppress_context__ else other.__context__)


def _innermost(lines: Sequence[_Line], or_installed: bool = True) -> list[str]:
    """Return in words the first line of the user's own code; where there is none, of a package that is installed."""
    shown = [line for line in lines if _is_users(line[0])]
    if or_installed:
        shown += [line for line in lines if _is_installed(line[0])]
    return [f"  {file}:{number}, in {name}: {linecache.getline(file, number).strip()}" for file, number, name in shown][
        :1
    ]


def _is_installed(file: str) -> bool:
    return bool(_INSTALLED & {*Path(file).parts}) and not file.startswith(OURS)


def _is_users(file: str) -> bool:
    """Tell whether it is neither ours, torch's, Python's nor an installed package's, and stands in a file."""
    return not (file.startswith(("<", *OURS, _STANDARD)) or _is_installed(file))


def _of_ranks(message: str) -> list[str]:
    """Return how the ranks ended, and of each one's report the error and the line that raised it."""
    head, *reports = _RANK.split(message)
    lines = [f"RanksFailedError: {head.strip()}"]
    for rank, fate, report in zip(*[iter(reports)] * 3, strict=True):
        found = [(file, int(number), name) for file, number, name in _FRAME.findall(report)]
        if fate == "raised":  # a traceback, whose innermost line is its last; a stack of a rank that hangs begins there
            found.reverse()
        text = report.strip().splitlines()
        last = max((i for i, line in enumerate(text) if line.startswith(" ")), default=-1)
        said = " ".join(text[last + 1 :]) if fate in ("raised", "died") else fate
        lines += [f"{rank}: {sentence(_SECTION.sub('', said))}", *_innermost(found)]
    return lines
