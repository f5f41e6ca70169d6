"""Groups of pictures of similar shape."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import sequence

__all__ = ["aspect_ratio_groups"]


def aspect_ratio_groups(
    widths: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
    heights: Sequence[float] | npt.NDArray[Any] | torch.Tensor,
    edges: Sequence[float] = (1.0,),
) -> npt.NDArray[np.int64]:
    """Group pictures by the interval that their aspect ratio, width / height, lies in.

    Args:
        widths: Each picture's width, in any unit, above 0.
        heights: Each picture's height, in the same unit, above 0.
        edges: The ratios between one interval and the next, in increasing order. An edge belongs to the upper interval.
            With the default, upright pictures are in group 0, square and wide ones in group 1.

    Returns:
        Each picture's group, from 0 to ``len(edges)``, in the shape ``(pictures,)``.

    Raises:
        SamplerError: A size is not above 0, the edges do not increase, or widths and heights differ in number.

    Examples:
        >>> aspect_ratio_groups([640, 480, 500], [480, 640, 500]).tolist()
        [1, 0, 1]
        >>> aspect_ratio_groups([640, 480, 500], [480, 640, 500], edges=[0.8, 1.25]).tolist()
        [2, 0, 1]

    Source:
        torchvision's detection references, ``group_by_aspect_ratio.py``.
    """
    wide, high, bounds = (_numbers(*pair) for pair in (("widths", widths), ("heights", heights), ("edges", edges)))
    if len(wide) != len(high):
        raise SamplerError(
            f"widths has {len(wide)} entries and heights {len(high)}: a picture has one of each. Pass sequences of one "
            "length."
        )
    if (np.diff(bounds) <= 0).any():
        raise SamplerError(
            f"edges={bounds.tolist()} do not increase, so they bound no intervals. Pass aspect ratios in increasing "
            "order."
        )
    return np.searchsorted(bounds, wide / high, side="right")


def _numbers(name: str, values: Any) -> npt.NDArray[np.float64]:
    """Return finite numbers above 0 as one array, or raise SamplerError."""
    found = np.asarray(sequence(name, values, "aspect ratios are made of numbers"))
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        raise SamplerError(
            f"{name} has the shape {found.shape} and the type {found.dtype}: aspect ratios are made of numbers. Pass a "
            "flat list, array or tensor of them."
        )
    if len(odd := np.flatnonzero(~((found > 0) & np.isfinite(found)))):
        raise SamplerError(
            f"{name}[{odd[0]}]={found[odd[0]]} is not a finite number above 0, and an aspect ratio is width / height. "
            "Correct it or leave it out."
        )
    return found.astype(np.float64)
