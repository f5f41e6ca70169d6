"""With share="by_worker", a dataset asks for its worker by its first item, and for nothing else of its place."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from messages import raises
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import RankMismatchError, UnsupportedLoaderError
from ddp_patch.loaders.facts import held_for_workers, look_at
from ddp_patch.ranks.exchange import require_same

N = 8


class All(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Late(All):
    def __iter__(self) -> Iterator[int]:
        yield 0
        info: Any = get_worker_info()
        yield from range(1 + info.id, N, info.num_workers)


class Split(All):
    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        yield from range(info.id, N, info.num_workers)


class ByRank(Split):
    def __iter__(self) -> Iterator[int]:
        ranks, workers = int(os.environ.get("WORLD_SIZE", "1")), super().__iter__()
        return (one for one in workers if one % ranks == int(os.environ.get("RANK", "0")))


class Logging(ByRank):
    """Asks for its rank, and says that it does not shard by it."""

    is_ddp_aware = False


def read(dataset: Any, rank: int = 0) -> list[int]:
    given = DataLoader(dataset, batch_size=None)
    loader = patch_dataloader_to_ddp(given, rank=rank, num_replicas=2, share="by_worker", uneven="keep")
    return [*loader]


@pytest.mark.parametrize("kind", [All, Late])
def test_one_that_has_not_asked_by_its_first_item_is_refused(kind: Any) -> None:
    facts = (kind.__name__, "share='by_worker'", "first item", "get_worker_info()", "each rank would read all of it")
    with raises(UnsupportedLoaderError, facts, "Leave share out"):
        read(kind())
    if kind is All:
        given = DataLoader(All(), batch_size=None)
        assert [*patch_dataloader_to_ddp(given, rank=1, num_replicas=2)] == [1, 3, 5, 7]


def test_one_that_asks_for_its_rank_is_refused_unless_it_says_why() -> None:
    with raises(UnsupportedLoaderError, ("ByRank", "asked for its rank"), "is_ddp_aware = True"):
        read(ByRank())
    assert read(Logging(), 1) == [1, 3, 5, 7]


class Holding(Split):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def judge(*datasets: Any) -> None:
    require_same("Agreeing", {rank: held_for_workers(look_at(DataLoader(one))) for rank, one in enumerate(datasets)})


def test_what_it_holds_is_the_same_on_every_rank() -> None:
    files = [f"part-{number}" for number in range(6)]
    judge(Holding(files=files, seed=1), Holding(files=[*files], seed=2))
    for other in (files[1::2], files[::-1]):
        with raises(
            RankMismatchError, ("files and numbers that Holding holds", "ranks 1, 2"), "the same on every rank"
        ):
            judge(Holding(files=files), Holding(files=other), Holding(files=other))
    aware: Any = [Holding(start=rank) for rank in (0, 1)]
    with raises(RankMismatchError, "Holding holds", "the same on every rank"):
        judge(*aware)
    for one in aware:
        one.is_ddp_aware = False
    judge(*aware)
