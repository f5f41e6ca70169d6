"""Say in a few lines why an audit could not run: the error, and the line of the user's code that it comes from."""

import sysconfig
import traceback
from pathlib import Path

import ddp_patch
from ddp_patch.auditing.sentences import sentence

__all__ = ["told"]

# Code in these folders is not the user's.
_NOT_THE_USERS = (
    str(Path(str(ddp_patch.__file__)).parent),
    sysconfig.get_path("stdlib"),
    "<",  # code that stands in no file
)
_INSTALLED = {"site-packages", "dist-packages"}


def told(error: BaseException, shows_traceback: bool = False) -> str:
    """Return an error's type, message and notes, and where in the user's code it was raised.

    Args:
        error: The error.
        shows_traceback: Whether to put the whole traceback first.
    """
    message = str(error)
    lines = [sentence(f"{type(error).__name__}: {message}" if message else type(error).__name__)]
    lines += map(sentence, getattr(error, "__notes__", []))
    if (frame := _users_frame(error)) is not None:
        lines.append(f"  {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}")
    if shows_traceback:
        lines = ["".join(traceback.format_exception(error)).rstrip(), *lines]
    elif frame is not None:
        lines.append("Pass --traceback to see all of it.")
    return "\n".join(lines)


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's own code."""
    users = (frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if _is_users(frame.filename))
    return next(users, None)


def _is_users(file: str) -> bool:
    return not (file.startswith(_NOT_THE_USERS) or _INSTALLED & {*Path(file).parts})
