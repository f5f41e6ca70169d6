"""The parts of an iterable dataset: what each worker of the unpatched loader reads, shared by the ranks."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from time import sleep
from typing import Any

import pytest
import torch
from iterables import (
    AsksLate,
    HasState,
    OwnIterator,
    OwnIteratorWithState,
    RunPerWorker,
    RunWithState,
    SeededByWorker,
    ShardPerWorker,
    Shards,
    SizedShards,
    SplitByInit,
    init_splits,
)
from messages import raises
from parts import assert_parts_are_shared, epoch, loader_of, ranks, share
from quick import in_turn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo
from zoo import Source

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.options import Uneven
from ddp_patch.streams import stream_sampler

THREE: Any = {"lengths": (2, 14, 7)}
# By name: the dataset, and which numbers of workers it can be read by.
SPLIT: dict[str, tuple[Callable[[], IterableDataset[int]], tuple[int, ...]]] = {
    "a shard for each worker": (partial(ShardPerWorker, **THREE), (2, 3)),
    "unequal shards": (Shards, (0, 1, 2, 3)),
    "more workers than shards": (partial(Shards, (5, 4)), (3,)),
    "an empty stream": (partial(Shards, (0, 0)), (0, 2)),
    "unequal shards with len": (SizedShards, (0, 2)),
    "a run for each worker": (partial(RunPerWorker, **THREE), (0, 3)),
    "the iterator has a state": (partial(RunWithState, **THREE), (0, 2)),
    "the dataset has a state": (partial(HasState, **THREE), (0, 2)),
    "split item by item": (partial(Source, splits=True), (0, 2)),
}
UNSPLIT: dict[str, Callable[[], IterableDataset[int]]] = {
    "a stream": Source,
    "its own iterator": OwnIterator,
    "its own iterator, once": partial(OwnIterator, begins_anew=False),
    "its own iterator with a state": OwnIteratorWithState,
}
ALONE = [name for name, (_, workers) in SPLIT.items() if 0 in workers]
READ_BY_WORKERS = [(name, k) for name, (_, workers) in SPLIT.items() for k in workers if k]
UNEVEN: list[Uneven] = ["pad", "drop", "keep"]
every_uneven = pytest.mark.parametrize("uneven", UNEVEN)


@every_uneven
@pytest.mark.parametrize("name", ALONE)
def test_a_main_process_reads_the_one_part_that_there_is(name: str, uneven: Uneven) -> None:
    make, _ = SPLIT[name]
    for world_size, batch_size, drop_last in product((1, 3), (None, 1, 3), (False, True)):
        if not drop_last or batch_size:
            assert_parts_are_shared(make, 0, world_size, uneven, batch_size, drop_last)


@pytest.mark.parametrize(("name", "workers", "uneven"), in_turn(READ_BY_WORKERS, UNEVEN))
def test_workers_read_what_torchs_would_and_ranks_share_it(name: str, workers: int, uneven: Uneven) -> None:
    make, _ = SPLIT[name]
    world_size = 2 + (workers + UNEVEN.index(uneven)) % 3  # each of 2, 3 and 4 with each of both
    assert_parts_are_shared(make, workers, world_size, uneven)


@pytest.mark.parametrize(("batch_size", "drop_last"), [(None, False), (1, False), (3, True), (4, True)])
@pytest.mark.parametrize("name", ["a shard for each worker", "unequal shards"])
def test_each_worker_makes_its_own_batches(name: str, batch_size: int | None, drop_last: bool) -> None:
    make, _ = SPLIT[name]
    for world_size in (1, 2):
        assert_parts_are_shared(make, 2, world_size, "pad", batch_size, drop_last)


@every_uneven
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_worker_init_fn_that_splits_the_dataset_makes_parts(workers: int, uneven: Uneven) -> None:
    assert_parts_are_shared(SplitByInit, workers, 2, uneven, worker_init_fn=init_splits)


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_that_the_workers_seed_shuffles_are_shared_too(workers: int) -> None:
    """The seed is one on all ranks, else they would share different orders; another worker and epoch has another."""
    (alone,) = ranks(lambda: loader_of(SeededByWorker(), workers), 1)
    unpatched = epoch(loader_of(SeededByWorker(), workers)).parts
    assert {worker: sorted(part) for worker, part in alone.parts.items()} == {
        worker: sorted(part) for worker, part in unpatched.items()
    }
    for world_size in (2, 3):
        reads = ranks(lambda: loader_of(SeededByWorker(), workers), world_size)
        for worker, part in alone.parts.items():
            for rank, read in enumerate(reads):
                assert read.parts[worker] == share(part, rank, world_size, "pad")


# A dataset that never asks.


@pytest.mark.parametrize(("name", "uneven"), in_turn(((name,) for name in UNSPLIT), UNEVEN))
def test_a_dataset_that_never_asks_gives_each_sample_once(name: str, uneven: Uneven) -> None:
    """Where torch's workers would each give all of it. They take turns at the rank's share."""
    make = UNSPLIT[name]
    stream = list(make())
    for workers, world_size in [(0, 1), (0, 2), (0, 4), (1, 2), (2, 1), (2, 3), (3, 2)]:
        reads = ranks(lambda workers=workers: loader_of(make(), workers), world_size, uneven=uneven)  # type: ignore[misc]
        for rank, read in enumerate(reads):
            assert read.items == share(stream, rank, world_size, uneven)
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


def test_the_seed_that_a_worker_is_told_is_another_one_in_the_next_epoch() -> None:
    loader = patch_dataloader_to_ddp(loader_of(WhoAmI(), 1), rank=0, num_replicas=2)
    first, second = ({item[2] for item in epoch(loader).items} for _ in range(2))
    assert len(first) == len(second) == 1
    assert first != second


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
    monkeypatch.setattr(stream_sampler, "_LONG_S", 0.05)
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
