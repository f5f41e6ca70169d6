"""The attributes in which self-sharding samplers and datasets store their rank, and how webdataset finds it."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch.distributed as dist

__all__ = ["READERS", "WORLD_NAMES", "WORLD_WORDS", "is_single_node_only", "splits_by_node", "webdataset_world"]

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

# Words in the names of all attributes of an object that describes only a world, such as mosaicml's and litdata's. A
# script's arguments may be only whole numbers, too.
WORLD_WORDS: Final = ("rank", "world", "node", "worker", "leader")

# timm's IterableImageDataset keeps what shards in this attribute; its class is not a dataset.
READERS: Final[Sequence[str]] = ("reader",)


def splits_by_node(attributes: Mapping[str, Any]) -> bool:
    """Return whether a stage of a webdataset's pipeline is ``split_by_node``, which ``nodesplitter=`` puts there.

    The function stores no world; it asks for one when it runs. A copy of it in another package keeps its name. Seen in
    webdataset 1.0.2.
    """
    return _has_stage(attributes, "split_by_node")


def is_single_node_only(attributes: Mapping[str, Any]) -> bool:
    """Return whether a stage of a webdataset's pipeline is ``single_node_only``, the default of ``nodesplitter=``.

    It raises a ValueError when it runs on several ranks, and else does nothing. Seen in webdataset 1.0.2.
    """
    return _has_stage(attributes, "single_node_only")


def webdataset_world() -> tuple[int, int]:
    """Return the rank and the number of ranks that webdataset's stages see now."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _has_stage(attributes: Mapping[str, Any], name: str) -> bool:
    stages = attributes.get("pipeline")
    return isinstance(stages, list) and any(_function_name(stage) == name for stage in stages)


def _function_name(value: Any) -> str | None:
    return getattr(value.func if isinstance(value, partial) else value, "__name__", None)
