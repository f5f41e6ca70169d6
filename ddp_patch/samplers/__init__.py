"""Samplers that are needed again and again, and that a plain ``DistributedSampler`` cannot stand in for.

They know nothing of ranks: ``patch_dataloader_to_ddp`` shares what they yield. Given a ``seed``, the order follows from
(seed, epoch), and each rank looks its share up; otherwise a pass draws one number from ``generator``, or from torch's
global generator, and its order follows from that.
"""

from ddp_patch.samplers.grouped import GroupedBatchSampler, aspect_ratio_groups
from ddp_patch.samplers.iterations import IterationBatchSampler
from ddp_patch.samplers.lengths import LengthBucketBatchSampler
from ddp_patch.samplers.pk import PKBatchSampler
from ddp_patch.samplers.scalable import ScalableRandomSampler
from ddp_patch.samplers.weighted import WeightedClassSampler
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
