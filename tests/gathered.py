"""What the outputs of several ranks come to, put together without sending anything."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.evaluation.gather import expected_of_pass, expected_of_step, placed_by_kind
from ddp_patch.evaluation.judging import LocalOutputs, judge_outputs, report
from ddp_patch.evaluation.outputs import RowKind, cut, filled
from ddp_patch.evaluation.row_order import Placed
from ddp_patch.evaluation.send import Connection, Members, gathered
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
        expect = partial(expected_of_step, given, batches) if in_step else partial(expected_of_pass, batches)
        reports.append(report(own, expect, None, pad, None))
    agreement = judge_outputs(operation, range(len(loaders)), {rank: said for rank, (said, _) in enumerate(reports)})
    owns = [own for _, own in reports if isinstance(own, LocalOutputs)]
    placed_as, sizes = placed_by_kind(agreement.rows, [own.expected.keys for own in owns], owns[0].expected.schedule)
    leaves = {}
    for path, (kind, nest, columns) in agreement.leaves.items():
        rows, placed = {}, placed_as[kind]
        for name, column in columns.items():
            result: Any = None
            for rank, own in enumerate(owns):
                counts = [count if share == rank else 0 for share, count in enumerate(placed.counts)]
                alone = Connection(Members([*range(len(loaders))], rank, None, 1.0), None)
                mine = Placed([*counts, placed.rows - counts[rank]], only(rank, placed))
                pickled = [size if share == rank else 0 for share, size in enumerate(column.pickled)]
                part = gathered(alone, replace(column, pickled=pickled), mine, own.given(path, kind, name, pad), pad)
                result = part if result is None else put(result, part, [*chain.from_iterable(placed.places(rank))])
            rows[name] = result
        leaves[path] = cut(nest, rows, sizes()) if kind is RowKind.LIST else rows[next(iter(rows))]
    return filled(agreement.nest, leaves)


def only(rank: int, placed: Placed) -> Callable[[int], Iterator[Any]]:
    return lambda share: placed.places(share) if share == rank else iter(())


def put(result: Any, part: Any, places: list[int]) -> Any:
    for place in places:
        result[place] = part[place]
    return result
