"""Why every rank sees the same stream: what rank 0 sends to all. The only module that communicates."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_patch.world import World

__all__ = ["agree"]


def agree(world: World, seed: int | None, generators: Sequence[torch.Generator]) -> int:
    """Return rank 0's seed on every rank, with the given generators in rank 0's state.

    One broadcast. In a world that was given explicitly nothing is sent: the generators stay as they are, and the
    seed is 0 unless one is given, as in ``torch.utils.data.DistributedSampler``.
    """
    if world.group is None:
        return 0 if seed is None else seed
    own_seed = torch.initial_seed() if seed is None else seed
    record: list[Any] = [own_seed, *(generator.get_state() for generator in generators)]
    dist.broadcast_object_list(record, group=world.group, group_src=0)
    agreed_seed: int
    agreed_seed, *states = record
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    return agreed_seed
