"""Which device ``device=`` means on this rank."""

import os
from types import ModuleType
from typing import Any, TypeAlias

import torch

from ddp_patch.errors import InvalidOptionError

__all__ = ["AUTO", "Device", "checked_device", "device_here"]

Device: TypeAlias = torch.device | str

AUTO = "auto"

_REMEDY = "Pass 'auto', a name such as 'cuda' or 'cuda:1', a torch.device, or leave it out."


def checked_device(given: object) -> Device | None:
    """Return the device that a user names, as a ``torch.device``; ``"auto"`` and None stay.

    Raises:
        InvalidOptionError: It names none.
    """
    if given is None or (isinstance(given, str) and given == AUTO):
        return given
    if not isinstance(given, torch.device | str):
        raise InvalidOptionError(f"device={given!r} is a {type(given).__name__}, not a device. {_REMEDY}")
    try:
        device = torch.device(given)
    except RuntimeError as error:  # what torch raises, in each version in other words
        raise InvalidOptionError(
            f"device={given!r} is not a device of torch ({_first_line(error)}). {_REMEDY}"
        ) from error
    _, colon, number = str(given).partition(":")
    if colon and number != str(device.index):  # torch keeps eight bits of it
        raise InvalidOptionError(f"device={given!r} is not a device of torch, which reads it as '{device}'. {_REMEDY}")
    return device


def device_here(chosen: Device | None, *, is_one_of_several: bool) -> torch.device | None:
    """Return the device on this rank, with ``"auto"`` resolved.

    Args:
        chosen: What ``checked_device`` returned.
        is_one_of_several: Whether there are other ranks, which may want devices of their own.

    Raises:
        InvalidOptionError: This process has no such device, or which one is this rank's is not known.
    """
    if chosen is None:
        return None
    if chosen == AUTO:
        return _this_ranks(is_one_of_several)
    device = torch.device(chosen)
    _require_there(device)
    return device


def _this_ranks(is_one_of_several: bool) -> torch.device:
    kind, count = _accelerators()
    if count < 1:
        return torch.device("cpu")
    if count == 1:  # also where a launcher shows each rank its own one alone
        return torch.device(kind, 0)
    told = os.environ.get("LOCAL_RANK", "").strip()
    if not told and not is_one_of_several:
        return torch.device(kind)  # as torch means it: the current one
    if not told:
        raise InvalidOptionError(
            f"device='auto' does not know which of {count} {kind} devices is this rank's: the environment has no "
            f"LOCAL_RANK, which torchrun sets. Pass device='{kind}:N' with this rank's N, or set LOCAL_RANK."
        )
    if not told.isdecimal() or int(told) >= count:
        raise InvalidOptionError(
            f"device='auto' takes the {kind} device with the number LOCAL_RANK={told}, and this process sees {count}, "
            f"from 0 to {count - 1}. Pass device='{kind}:N' with one of these, or start as many ranks on a machine as "
            "it has devices."
        )
    return torch.device(kind, int(told))


def _accelerators() -> tuple[str, int]:
    """Return the kind of device that this machine has besides its CPU, and how many of it this process sees."""
    found: Any = getattr(torch, "accelerator", None)  # newer than some torch that is supported
    if found is None:
        return "cuda", torch.cuda.device_count()
    kind = found.current_accelerator()
    return ("cpu", 0) if kind is None or not found.is_available() else (kind.type, found.device_count())


def _require_there(device: torch.device) -> None:
    module: ModuleType | None = getattr(torch, device.type, None)
    count_of = getattr(module, "device_count", None)
    if device.type != "cpu" and count_of is not None:
        count: int = count_of()
        if (device.index or 0) >= count:
            seen = f"{count} of that kind" if count < 2 else f"{count}, from 0 to {count - 1}"
            raise InvalidOptionError(
                f"device='{device}' does not exist: this process sees {seen} (torch {torch.__version__}). Pass "
                "device='auto', which takes the CPU if there is nothing else, or an existing number; or look for what "
                "hides it, such as CUDA_VISIBLE_DEVICES or a build of torch without it."
            )
        return
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise InvalidOptionError(
            f"device='{device}' cannot be used here: torch {torch.__version__} says {_first_line(error)!r}. Pass "
            "device='auto', or one that this build of torch knows."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
