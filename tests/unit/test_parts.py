"""Parts of an iterable dataset: what each worker of the unpatched loader reads, shared by ranks; or read by worker."""

import os
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import pytest
import torch
from claiming import new_store
from iterables import AsksLate, Shards, SizedShards
from messages import raises
from parts import assert_parts_are_shared, epoch, loader_of, ranks, share
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo
from zoo import Source

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import RankMismatchError, UnsupportedLoaderError
from ddp_patch.loaders.columns import lists_in
from ddp_patch.loaders.facts import look_at
from ddp_patch.options import Options, Uneven
from ddp_patch.patching import _subject
from ddp_patch.ranks import agreement
from ddp_patch.ranks.agreement import _report
from ddp_patch.ranks.world import World
from ddp_patch.streams import stream_passes


@pytest.mark.parametrize(
    ("workers", "batch_size", "drop_last", "uneven"),
    [(2, None, False, "pad"), (2, 1, False, "drop"), (3, 3, False, "keep"), (2, 4, True, "drop"), (3, 3, True, "keep")],
)
def test_each_worker_makes_its_own_batches(workers: int, batch_size: Any, drop_last: bool, uneven: Uneven) -> None:
    for world_size in (1, 2):
        assert_parts_are_shared(Shards, workers, world_size, uneven, batch_size, drop_last)


# A dataset that never asks.


@pytest.mark.parametrize("uneven", ["pad", "drop", "keep"])
def test_workers_of_a_dataset_that_never_asks_take_turns_at_the_ranks_share(uneven: Uneven) -> None:
    """Where torch's would each give all of it."""
    for workers, world_size in [(0, 4), (1, 2), (2, 3), (3, 2)]:
        reads = ranks(lambda workers=workers: loader_of(Source(), workers), world_size, uneven=uneven)  # type: ignore[misc]
        for rank, read in enumerate(reads):
            assert read.items == share([*Source()], rank, world_size, uneven)
            assert read.steps == [step % max(1, workers) for step in range(len(read.steps))]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_init_fn_that_leaves_the_dataset_alone_does_not_make_parts(workers: int) -> None:
    reads = ranks(lambda: loader_of(Source(), workers, worker_init_fn=torch.manual_seed), 2)
    for rank, read in enumerate(reads):
        assert read.items == share(list(Source()), rank, 2, "pad")


# Who is told what.


class WhoAmI(IterableDataset[Any]):
    """Gives, four times, what it is told of the worker that reads it."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            yield from [None] * 4
            return
        told = (info.id, info.num_workers, info.seed, isinstance(info, WorkerInfo), type(info.dataset).__name__)
        yield from [told] * 4


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_j_of_every_rank_is_told_what_torch_tells_it(workers: int) -> None:
    unpatched = epoch(loader_of(WhoAmI(), workers)).parts
    reads = ranks(lambda: loader_of(WhoAmI(), workers), 2)
    seeds = set()
    for worker in range(workers):
        told = {item for read in reads for item in read.parts[worker]}
        assert len(told) == 1  # the seed is one on both ranks
        ((number, count, seed, *rest),) = told
        assert (number, count, *rest) == (worker, workers, True, "WhoAmI")
        assert {(*item[:2], *item[3:]) for item in unpatched[worker]} == {(number, count, *rest)}
        seeds.add(seed)
    assert len(seeds) == workers


# Limits.


@pytest.mark.parametrize("items", [1, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_dataset_that_asks_after_its_first_item_is_refused(world_size: int, items: int) -> None:
    """What came before was taken for one stream, of which each worker gives a part."""
    with raises(UnsupportedLoaderError, ("AsksLate", "2 workers", "get_worker_info()"), ("__iter__", "num_workers=0")):
        ranks(lambda: loader_of(AsksLate(items), 2), world_size)


@pytest.mark.parametrize("workers", [0, 1])
def test_where_there_is_one_reader_a_dataset_may_ask_at_any_time(workers: int) -> None:
    assert_parts_are_shared(partial(AsksLate, 3), workers, 2, "pad")


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")  # torch's warning that there are more batches
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_a_length_is_short_by_at_most_a_batch_for_each_worker_but_one(workers: int) -> None:
    """As torch's is: it divides all samples by batch_size, and each worker's last batch may be short."""
    unpatched = loader_of(SizedShards((4, 4, 4)), workers)
    patched = patch_dataloader_to_ddp(loader_of(SizedShards((8, 8, 8)), workers), rank=0, num_replicas=2)
    more = [len(list(loader)) - len(loader) for loader in (unpatched, patched)]
    assert more[0] == more[1] == max(0, workers - 1)


class Slow:
    """Takes a while for each item."""

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():  # type: ignore[misc]  # a dataset's
            sleep(0.01)
            yield item


class SlowShards(Slow, Shards):
    pass


class SlowSource(Slow, Source):
    pass


def test_what_would_be_faster_is_said_after_the_first_pass(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_passes, "_LONG_S", 0.05)
    loader: Any = patch_dataloader_to_ddp(DataLoader(SlowShards(), 4, num_workers=2), rank=0, num_replicas=4)
    next(iter(loader))  # a look is no pass
    assert not [text for text in caplog.messages if "by_worker" in text]
    for _ in range(3):
        list(loader)
    (record,) = [record for record in caplog.records if "by_worker" in record.getMessage()]
    said = record.getMessage()
    assert "each of 4 ranks read all 23 items, and waited for them" in said
    assert "patch_dataloader_to_ddp(loader, share='by_worker') reads each item once" in said
    assert "restored on as many ranks and workers only" in said
    assert record.levelname == "WARNING"  # which a script sees unless it looks away


@pytest.mark.parametrize(
    ("dataset", "workers", "options"),
    [
        (SlowShards(), 2, {"rank": 1, "num_replicas": 4}),  # one rank speaks
        (SlowShards(), 2, {"rank": 0, "num_replicas": 1}),  # nobody reads twice
        (SlowShards(), 2, {"rank": 0, "num_replicas": 2, "share": "within_batches"}),
        (SlowSource(), 2, {"rank": 0, "num_replicas": 4}),  # it does not split itself
    ],
)
def test_nothing_is_said_where_nothing_would_be_faster(
    dataset: IterableDataset[int], workers: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="ddp_patch")
    list(patch_dataloader_to_ddp(DataLoader(dataset, 4, num_workers=workers), **options))
    assert not [text for text in caplog.messages if "by_worker" in text]


# With share="by_worker", a dataset asks for its worker by its first item, and for nothing else of its place.

FEW = 8


class All(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(FEW))


class Late(All):
    def __iter__(self) -> Iterator[int]:
        yield 0
        info: Any = get_worker_info()
        yield from range(1 + info.id, FEW, info.num_workers)


class Split(All):
    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        yield from range(info.id, FEW, info.num_workers)


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
    with raises(UnsupportedLoaderError, ("ByRank", "asked for its rank"), ("get_worker_info() alone", "False", "True")):
        read(ByRank())
    assert read(Logging(), 1) == [1, 3, 5, 7]


class Holding(Split):
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


OPTIONS, SHARES = Options(share="by_worker"), {0: 0, 1: 1, 2: 2}


def judge(*datasets: Any) -> None:
    reports = {}
    for rank, dataset in enumerate(datasets):
        report = _report(_subject("", look_at(DataLoader(dataset)), OPTIONS, World(rank, 3, SHARES)), (), (), False)
        reports[rank] = {"alike": {}, "common": {}, "seed": 0, "share": rank, "loaders": [report]}
    with patch.object(agreement, "default_store", new_store):
        agreement.judge_reports(reports)


FILES = [f"part-{number}" for number in range(6)]


@pytest.mark.parametrize(
    ("held", "other", "told"),
    [
        (FILES, FILES[1::2], ("Holding.held: 6, from part-0 to part-5 (digest", "on rank 0; 3, from part-1 to part-5")),
        (FILES, FILES[::-1], ("Holding.held: 6, from part-0 to part-5", "; 6, from part-5 to part-0", "on ranks 1, 2")),
        (FILES, [*FILES[:5], "part-7"], ("on rank 0; 6, from part-0 to part-7",)),
        (FILES, [*FILES[:4], "part-7", FILES[5]], ("on rank 0; 6, from part-0 to part-5",)),
        (FILES, [], ("on rank 0; 0 on ranks 1, 2",)),
        (range(50), range(50, 100), ("Holding.held: 50, from 0 to 49", "; 50, from 50 to 99")),
        (torch.arange(100), torch.arange(100, 200), ("Holding.held: 100, from 0 to 99", "; 100, from 100 to 199")),
        ({"train": FILES}, {"train": FILES[3:]}, ("Holding.held['train']: 6,", "on rank 0; 3, from part-3")),
        (Path("/data/a/0.tar"), [Path("/data/a/1.tar")], ()),  # one of them is no list
        (
            ["a/0/images", "a/1/images"],
            ["b/0/images", "b/2/images"],
            ("Holding.held: 2, from 0/images to 1/images", "on rank 0; 2, from 0/images to 2/images"),
        ),
    ],
)
def test_each_rank_holds_files_of_its_own(held: Any, other: Any, told: tuple[str, ...]) -> None:
    """The data would be split over all workers once more: the error shows where the lists differ."""
    datasets = Holding(held=held), Holding(held=other), Holding(held=other)
    if not told:
        judge(*datasets)
    else:
        with raises(RankMismatchError, told, "the same on every rank"):
            judge(*datasets)
        for one in datasets:
            vars(one)["is_ddp_aware"] = False
        judge(*datasets)


def test_long_texts_are_described_in_short() -> None:
    (described,) = lists_in(Holding(held=["a" * 10**6, "b" * 10**6])).values()
    assert len(described) < 250


class Token:
    """Stands for what a package keeps under a key that it makes of this process and thread."""

    def __init__(self, rank: int) -> None:
        self.by_token = {f"{rank:032x}": {"paths": [f"listed-{rank}"], "token": f"{rank:032x}"}}


@pytest.mark.parametrize(
    "of_rank",
    [
        lambda rank: f"{rank:032x}",  # an id
        lambda rank: 1_700_000_000 + rank,  # a date
        lambda rank: date(2024, 1, 1 + rank),
        lambda rank: f"/data/of-rank-{rank}/files",
        lambda rank: [f"/local/tmpabcdefg{rank}"],  # as tempfile names a folder
        lambda rank: [f"/local/tmpabcdefg{rank}/{name}" for name in FILES],
        lambda rank: [f"/home/user-{rank}/data/{name}" for name in FILES],
        lambda rank: [f"https://example.org/{name}?signature={rank}" for name in FILES],
        lambda rank: [0.5 + rank, 1.5],  # times
        lambda rank: {"cache": [f"read-{number}" for number in range(rank)]},
        lambda rank: {"seeds": [rank], "ranks": [rank], "devices": [f"cuda:{rank}"]},
        Token,
    ],
)
def test_each_rank_holds_something_that_is_no_list_of_files(of_rank: Any) -> None:
    judge(*(Holding(files=FILES, held=of_rank(rank)) for rank in range(3)))
