"""torchvision's samplers of video clips."""

from functools import partial

import torch
from torchvision.datasets.samplers import DistributedSampler, RandomClipSampler, UniformClipSampler
from torchvision.datasets.video_utils import VideoClips

from third_party.base import Case, Fate, World, drawn_by


def clips() -> VideoClips:
    """Clips of three videos that are not there: samplers only ask how many each has."""
    frames = [torch.arange(count) for count in (9, 12, 16)]
    metadata = {"video_paths": ["a", "b", "c"], "video_pts": frames, "video_fps": [1.0] * 3}
    return VideoClips(metadata["video_paths"], clip_length_in_frames=2, _precomputed_metadata=metadata)


def shared(world: World) -> DistributedSampler:
    return DistributedSampler(UniformClipSampler(clips(), 6), world.size, world.rank, shuffle=True, group_size=6)


case = partial(Case, "torchvision")
CASES = [
    case("`RandomClipSampler`", lambda world: drawn_by(RandomClipSampler(clips(), 7), 100)),
    case("`UniformClipSampler`", lambda world: drawn_by(UniformClipSampler(clips(), 7), 100)),
    case("`samplers.DistributedSampler`", lambda world: drawn_by(shared(world), 100), Fate.AS_IT_IS, repeats=True),
    case("`samplers.DistributedSampler`, of one process", lambda world: drawn_by(shared(World()), 100)),
]
