"""Ready-made samplers for common cases, which ``patch_dataloader_to_ddp`` keeps intact.

Build a sampler as for one process: the patch shards the items that it yields. With ``seed``, an epoch's order follows
from the seed and the epoch, and each rank looks up its share. Without ``seed``, a pass draws one number from
``generator``, or from torch's global generator, and the order follows from this number.
"""

from ddp_patch.samplers.classes import PKBatchSampler, WeightedClassSampler
from ddp_patch.samplers.grouped import GroupedBatchSampler, LengthBucketBatchSampler, aspect_ratio_groups
from ddp_patch.samplers.keyed import IterationBatchSampler, ScalableRandomSampler
from ddp_patch.samplers.windows import WindowDataset, WindowSampler

__all__ = [
    "GroupedBatchSampler",
    "IterationBatchSampler",
    "LengthBucketBatchSampler",
    "PKBatchSampler",
    "ScalableRandomSampler",
    "WeightedClassSampler",
    "WindowDataset",
    "WindowSampler",
    "aspect_ratio_groups",
]
