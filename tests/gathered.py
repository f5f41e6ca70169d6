"""What the outputs of several ranks come to, put together without sending anything."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.evaluation.gather import got_in_pass, got_in_step
from ddp_patch.evaluation.judging import judge, report
from ddp_patch.evaluation.outputs import Kind, cut, filled
from ddp_patch.evaluation.send import (
    Connection,
    LocalColumn,
    Members,
    StepStand,
    WholeStand,
    gathered,
    placed_in_step,
    placed_whole,
)
from ddp_patch.evaluation.steps import require_one_stream

__all__ = ["shares", "together"]


def shares(world_size: int, **options: Any) -> list[DataLoader[Any]]:
    given = {name: options.pop(name) for name in ("batch_size", "batch_sampler", "sampler") if name in options}
    return [
        patch_dataloader_to_ddp(loader(**given), rank=rank, num_replicas=world_size, **options)
        for rank in range(world_size)
    ]


def together(outputs: list[Any], loaders: Sequence[DataLoader[Any]], *, pad: Any = None, in_step: bool = False) -> Any:
    """As all ranks would have it, each rank's rows put where they belong."""
    operation, reports = "gather_step" if in_step else "gather_in_order", []
    for own, given in zip(outputs, loaders, strict=True):
        batches = require_one_stream(operation, given)
        got = partial(got_in_step, given, batches) if in_step else partial(got_in_pass, batches)
        reports.append(report(own, got, None, pad, None))
    agreement = judge(operation, range(len(loaders)), {rank: said for rank, (said, _) in enumerate(reports)})[0]
    whole = [stand for stand in agreement.stands if isinstance(stand, WholeStand)]
    steps = [stand for stand in agreement.stands if isinstance(stand, StepStand)]
    own_stand = reports[0][1].stand
    placed = placed_whole(whole, own_stand) if isinstance(own_stand, WholeStand) else placed_in_step(steps)
    leaves = {}
    for path, (kind, nest, columns) in agreement.leaves.items():
        rows = {}
        for name, column in columns.items():
            result: Any = None
            for rank, (_, own) in enumerate(reports):
                mine = [places if share == rank else [] for share, places in enumerate(placed[kind].places)]
                alone = Connection(Members([*range(len(loaders))], rank, None, 1.0), None)
                came = LocalColumn() if own.share is None else own.given(path, kind, name, pad)
                part = gathered(alone, column, type(placed[kind])(placed[kind].rows, mine), came, pad)
                result = part if result is None else put(result, part, [place for run in mine[rank] for place in run])
            rows[name] = result
        leaves[path] = cut(nest, rows, placed[kind].cuts) if kind is Kind.LIST else rows[next(iter(rows))]
    return filled(agreement.nest, leaves)


def put(result: Any, part: Any, places: list[int]) -> Any:
    for place in places:
        result[place] = part[place]
    return result
