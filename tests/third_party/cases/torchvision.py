"""torchvision's samplers of video clips."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torchvision.datasets.samplers import DistributedSampler, RandomClipSampler, UniformClipSampler
from torchvision.datasets.video_utils import VideoClips

from third_party.base import Case, Fate, Numbers, World


def clips() -> VideoClips:
    """Clips of three videos that are not there: samplers only ask how many each has."""
    frames = [9, 12, 16]
    metadata = {
        "video_paths": ["a", "b", "c"],
        "video_pts": [torch.arange(count) for count in frames],
        "video_fps": [1.0] * 3,
    }
    return VideoClips(metadata["video_paths"], clip_length_in_frames=2, _precomputed_metadata=metadata)


def drawn_by(sampler: Sampler[int]) -> DataLoader[int]:
    return DataLoader(Numbers(100), 4, sampler=sampler)


def shared_by_itself(world: World) -> Any:
    inner = UniformClipSampler(clips(), 6)
    return drawn_by(DistributedSampler(inner, world.size, world.rank, shuffle=True, group_size=6))


CASES = [
    Case("torchvision", "`RandomClipSampler`", lambda world: drawn_by(RandomClipSampler(clips(), 7))),
    Case("torchvision", "`UniformClipSampler`", lambda world: drawn_by(UniformClipSampler(clips(), 7))),
    Case("torchvision", "`samplers.DistributedSampler`", shared_by_itself, Fate.AS_IT_IS, repeats=True),
    Case("torchvision", "`samplers.DistributedSampler`, of one process", lambda world: shared_by_itself(World())),
]
