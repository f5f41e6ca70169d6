"""All ranks' outputs in order, and which samples are padding."""

from ddp_patch.evaluation.gather import gather_in_order
from ddp_patch.evaluation.masks import iter_with_mask

__all__ = ["gather_in_order", "iter_with_mask"]
