"""The two ways in which accelerate takes a patched loader over."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ddp_patch.integrations.accelerate import prepare_patched

__all__ = ["ways_to_prepare"]


def ways_to_prepare(accelerator: Any) -> dict[str, Callable[[Any], Any]]:
    """Return them by their names."""
    return {"prepare": accelerator.prepare, "prepare_patched": partial(prepare_patched, accelerator)}
