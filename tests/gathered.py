"""What the outputs of several ranks come to: each is a thread, and what they send goes from one to another."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.evaluation.gather import expected_of_pass, expected_of_step
from ddp_patch.evaluation.judging import judge_outputs, report
from ddp_patch.evaluation.sending import Sending, result_of
from ddp_patch.evaluation.steps import require_one_stream

__all__ = ["shares", "together"]


def shares(world_size: int, **options: Any) -> list[DataLoader[Any]]:
    given = {name: options.pop(name) for name in ("batch_size", "batch_sampler", "sampler") if name in options}
    return [
        patch_dataloader_to_ddp(loader(**given), rank=rank, num_replicas=world_size, **options)
        for rank in range(world_size)
    ]


def together(outputs: list[Any], loaders: Sequence[DataLoader[Any]], *, in_step: bool = False) -> Any:
    """As each rank would have it."""
    operation, reports = "gather_step" if in_step else "gather_in_order", []
    for own, given in zip(outputs, loaders, strict=True):
        batches = require_one_stream(operation, given)
        expect = partial(expected_of_step, given, batches) if in_step else partial(expected_of_pass, batches)
        reports.append(report(own, expect, None))
    agreement = judge_outputs(operation, {rank: said for rank, (said, _) in enumerate(reports)})
    sendings = [Sending.of(agreement, own) for _, own in reports]
    headers = np.stack([each.header for each in sendings])
    everyone, sent = Barrier(len(loaders)), list[Any](loaders)

    def on_rank(rank: int) -> Any:
        def transport(data: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
            assert len(data) == sizes[rank]
            sent[rank] = data
            everyone.wait(60)
            came = [*sent]
            everyone.wait(60)
            return came

        return result_of(sendings[rank], headers, transport)

    with ThreadPoolExecutor(len(loaders)) as pool:
        first, *_ = list(pool.map(on_rank, range(len(loaders))))
    return first
