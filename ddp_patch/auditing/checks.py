"""Check what the user asks an audit for."""

from collections.abc import Collection, Mapping
from typing import Any, SupportsIndex, cast

from ddp_patch.auditing.problems import problem_kinds
from ddp_patch.errors import InvalidOptionError
from ddp_patch.options import is_seconds, whole_number

__all__ = ["check_allowed", "check_both", "check_options", "check_run", "positive"]

# Refuse these options of patch_dataloader_to_ddp(): the audit says itself which rank a loader is for.
_OF_A_REAL_RANK = {"device", "rank", "num_replicas", "process_group", "device_mesh", "data_parallel_dimensions"}
# Refuse these values without real ranks: they make ranks communicate.
_COMMUNICATING = {"agreement": "leader", "verify": True}


def positive(name: str, value: SupportsIndex) -> int:
    """Return a whole number of at least 1."""
    found = whole_number(name, value)
    if found < 1:
        raise InvalidOptionError(f"audit with {name}={found} has nothing to do: pass a whole number of at least 1.")
    return found


def check_options(options: Mapping[str, Any], processes: bool) -> None:
    """Refuse options of ``patch_dataloader_to_ddp`` that need a real rank."""
    if given := sorted(_OF_A_REAL_RANK & options.keys()):
        raise InvalidOptionError(
            f"audit was given {', '.join(given)} for patch_dataloader_to_ddp(), which says where one real rank is, and "
            "audit makes all ranks itself. Leave that out; for a device mesh, pass a factory that makes it, and "
            "processes=True."
        )
    for name, value in _COMMUNICATING.items():
        if options.get(name) == value and not processes:
            raise InvalidOptionError(
                f"audit with {name}={value!r} needs ranks that communicate, and those of one process do not. Pass "
                "processes=True, too."
            )


def check_both(patch: bool, patched: bool) -> None:
    """Refuse to show what the patch changes without the patch."""
    if patched and not patch:
        raise InvalidOptionError(
            "audit with patched=True shows a loader before and after the patch, and patch=False leaves the patch out. "
            "Leave one of the two out."
        )


def check_allowed(allow: Collection[str]) -> None:
    """Refuse what names no kinds of problem."""
    if isinstance(allow, str):
        raise InvalidOptionError(f"allow={allow!r} is one string, and several may be named. Pass allow=[{allow!r}].")
    if not isinstance(cast(object, allow), Collection):
        raise InvalidOptionError(
            f"allow={allow!r} is a {type(allow).__name__}, not a list of kinds of problem. Pass some of these: "
            f"{', '.join(problem_kinds)}."
        )
    if unknown := [kind for kind in allow if kind not in problem_kinds]:
        raise InvalidOptionError(
            f"allow={unknown} names no kind of problem. Those that exist: {', '.join(problem_kinds)}."
        )


def check_run(timeout: object, progress: object) -> None:
    """Refuse a timeout that is no positive number of seconds, and a progress that cannot be called."""
    if not (is_seconds(timeout) and timeout > 0):
        raise InvalidOptionError(
            f"timeout={timeout!r} is not a positive number of seconds, and real ranks need an end. Pass one, such as "
            "120."
        )
    if progress is not None and not callable(progress):
        raise InvalidOptionError(
            f"progress={progress!r} is a {type(progress).__name__}, which cannot be called after each step of the "
            "audit. Pass a function progress(done, total), or None."
        )
