"""Samplers of other packages, and the attributes in which self-sharding classes store their rank."""

from collections.abc import Sequence
from typing import Final

from ddp_patch.compat.names import full_name

__all__ = [
    "READERS",
    "WORLD_NAMES",
    "WORLD_WORDS",
    "arranges_neighbours",
]

# ---- samplers that group samples into batches ----

# They give single indices, and make those of a batch as a group: a few samples of each class, a triplet, a prompt
# again and again. A rank that took every num_replicas-th index would get parts of groups. No sampler bears a mark of
# this, so they are known by name. Samplers that sort by length or only balance an epoch's classes are not among them:
# their neighbours may go to different ranks.
_ARRANGE_NEIGHBOURS: Final = {
    # pytorch-metric-learning, seen in 2.9.0
    "pytorch_metric_learning.samplers.fixed_set_of_triplets.FixedSetOfTriplets",
    "pytorch_metric_learning.samplers.m_per_class_sampler.MPerClassSampler",
    # trl, seen in 1.16.0; the others in 0.17
    "trl.trainer.utils.RepeatSampler",
    "trl.trainer.grpo_trainer.RepeatRandomSampler",
    "trl.trainer.grpo_trainer.RepeatSampler",
    # open-metric-learning's flattened batches, read in its repository of 2022; later editions have batch samplers alone
    "oml.samplers.balanced.SequentialBalanceSampler",
    "oml.samplers.balanced.SequentialCategoryBalanceSampler",
    # torchreid, read in its repository
    "torchreid.data.sampler.RandomIdentitySampler",
}


def arranges_neighbours(sampler: object) -> bool:
    """Return whether a sampler of single indices makes those of a batch as a group, so that batches must stay whole."""
    return not _ARRANGE_NEIGHBOURS.isdisjoint(map(full_name, type(sampler).__mro__))


# ---- samplers and datasets that shard themselves ----

# Attributes that hold a rank and the number of ranks, also with an underscore before each. No package promises them.
# Each pair by where it was seen:
WORLD_NAMES: Final[Sequence[tuple[str, str]]] = (
    ("rank", "num_replicas"),  # torch 2.13.0, torchvision 0.29.1, timm 1.0.31, Ultralytics 8.4.190
    ("rank", "world_size"),  # mmengine 0.10.7, lhotse 1.33.0; with underscores in detectron2 0.6
    ("rank", "num_ranks"),  # World of mosaicml-streaming 0.10.0
    ("global_rank", "world_size"),  # _DistributedEnv of litdata 0.2.76
    ("dist_rank", "dist_num_replicas"),  # the readers of timm 1.0.31
    ("rank", "dp_size"),  # BatchRebalanceSampler of transformers 5.23.0
    ("process_index", "num_processes"),  # accelerate 1.15.0, transformers 4.57.6
    ("data_parallel_rank", "data_parallel_size"),  # Megatron-LM
)

# What every attribute is called after in an object that tells of a world and of nothing else, as mosaicml's and
# litdata's do. A script's arguments may be whole numbers alone, too.
WORLD_WORDS: Final = ("rank", "world", "node", "worker", "leader")

# timm's IterableImageDataset keeps what shards in this attribute; its class is not a dataset.
READERS: Final[Sequence[str]] = ("reader",)
