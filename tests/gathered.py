"""What the outputs of several ranks come to, without sending anything."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.evaluation.outputs import judge_outputs
from ddp_patch.evaluation.sending import OwnOutputs, are_alike
from ddp_patch.evaluation.shares import share_of_pass, share_of_step
from ddp_patch.evaluation.steps import shared_batches

__all__ = ["shares", "together"]


def shares(world_size: int, **options: Any) -> list[DataLoader[Any]]:
    given = {name: options.pop(name) for name in ("batch_size", "batch_sampler", "sampler") if name in options}
    return [
        patch_dataloader_to_ddp(loader(**given), rank=rank, num_replicas=world_size, **options)
        for rank in range(world_size)
    ]


def together(outputs: list[Any], loaders: Sequence[DataLoader[Any]], *, in_step: bool = False) -> Any:
    """As each rank would have it."""
    operation, given = "gather_step" if in_step else "gather_in_order", []
    for own, shared in zip(outputs, loaders, strict=True):
        batches = shared_batches(operation, shared)
        assert batches is not None
        share_of = partial(share_of_step, shared, batches) if in_step else partial(share_of_pass, batches)
        given.append(OwnOutputs(own, share_of, None))
    chosen = judge_outputs(operation, {rank: own.said() for rank, own in enumerate(given)})
    if not are_alike(np.stack([own.header for own in given])):
        for own in given:
            own.choose(chosen)
    headers = np.stack([own.header for own in given])
    sent = [[*parts] for parts in zip(*(own.parts(headers) for own in given), strict=True)]
    assert all([*sizes] == [len(data) for data, _ in parts] for parts in sent for _, sizes in parts)
    first, *_ = [own.whole(headers, iter([[data for data, _ in parts] for parts in sent])) for own in given]
    return first
