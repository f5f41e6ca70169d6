"""All ranks' outputs in order, masks of padding, and weights for training."""

from ddp_patch.evaluation.gather import gather_in_order, gather_step
from ddp_patch.evaluation.steps import iter_with_mask, iter_with_weights

__all__ = ["gather_in_order", "gather_step", "iter_with_mask", "iter_with_weights"]
