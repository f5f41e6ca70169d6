"""Streams of webdataset, Hugging Face and torchdata: ranks share what each worker of the unpatched loader reads."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any

import iterables
import pytest
from parts import assert_parts_are_shared, epoch, loader_of, share
from quick import run_ranks, soaked
from third_party.base import tars as write_tars
from torch.utils.data import DataLoader
from zoo import N, seed_ambient

from ddp_patch import patch_dataloader_to_ddp

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when datasets is imported: nothing here is downloaded

import datasets
import webdataset as wds

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # which torchdata calls
    pytest.mark.filterwarnings("ignore:unclosed file"),  # webdataset's, as below
]


@pytest.fixture(autouse=True)
def closed_files() -> Iterator[None]:
    """webdataset leaves it to the garbage collector to close its files."""
    yield
    gc.collect()


SHARDS = iterables.shards_of((4, 9, 1, 6, 3))  # N numbers
worlds = pytest.mark.parametrize("world_size", [soaked(2), 3])
with_and_without_workers = pytest.mark.parametrize("workers", [0, 2])


# webdataset: tar files.


@pytest.fixture(scope="session")
def tars(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_tars(tmp_path_factory.mktemp("tars"), SHARDS)


def first(row: tuple[int]) -> int:
    return row[0]


def web(tars: Sequence[str], shuffled: dict[str, Any] | None = None, **options: Any) -> Any:
    options = {"shardshuffle": False, "nodesplitter": None} | options
    stream = wds.WebDataset(list(tars), **options).decode().to_tuple("cls")
    return stream if shuffled is None else stream.shuffle(4, initial=4, **shuffled)


WEB: dict[str, dict[str, Any]] = {
    "in order": {},
    "seeded shards": {"shardshuffle": 5, "seed": 3},
    "seeded shards, anew each epoch": {"shardshuffle": 5, "detshuffle": True, "seed": 3},
    "seeded shards and samples": {"shardshuffle": 5, "seed": 3, "shuffled": {"seed": 4}},
}


@worlds
@with_and_without_workers
@pytest.mark.parametrize("options", WEB.values(), ids=WEB)
def test_webdataset(options: dict[str, Any], workers: int, world_size: int, tars: list[str]) -> None:
    assert_parts_are_shared(lambda: web(tars, **options), workers, world_size, "pad", item_of=first)


def test_webdataset_with_more_workers_than_shards(tars: list[str]) -> None:
    few = partial(web, tars[:2], empty_check=False)
    assert_parts_are_shared(few, 3, 2, "pad", item_of=first)


# Hugging Face: streams, which split their shards over workers.


def read(shards: list[range]) -> Iterator[dict[str, int]]:
    for number in chain.from_iterable(shards):
        yield {"number": number}


def generated(shards: list[range] = SHARDS) -> Any:
    return datasets.IterableDataset.from_generator(read, gen_kwargs={"shards": shards})


def streamed(shards: int) -> Any:
    return datasets.Dataset.from_dict({"number": range(N)}).to_iterable_dataset(num_shards=shards)


def number(row: dict[str, int]) -> int:
    return row["number"]


def doubled(row: dict[str, int]) -> dict[str, int]:
    return {"number": 2 * row["number"]}


STREAMS: dict[str, Callable[[], Any]] = {
    "one shard": partial(streamed, 1),
    "4 shards": partial(streamed, 4),
    "5 shards of different lengths": generated,
    "shuffled": lambda: generated().shuffle(seed=3, buffer_size=5),
    "shuffled, one shard": lambda: streamed(1).shuffle(seed=3, buffer_size=50),
    "mapped and cut": lambda: generated().shuffle(seed=3, buffer_size=2).map(doubled).skip(2).take(11),
}


@worlds
@with_and_without_workers
@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_hugging_face(make: Callable[[], Any], workers: int, world_size: int) -> None:
    assert_parts_are_shared(make, workers, world_size, "pad", item_of=number)


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, {"workers": 1, "persistent_workers": True}])
def test_each_epoch_is_the_unpatched_loaders_of_that_number(options: dict[str, Any]) -> None:
    """Also of one that the dataset's own ``set_epoch`` sets after the patch, as its documentation resumes."""

    def make() -> Any:
        return loader_of(generated().shuffle(seed=3, buffer_size=5), item_of=number, **options)

    unpatched, seen = make(), []
    patched: list[Any] = [patch_dataloader_to_ddp(make(), rank=rank, num_replicas=2) for rank in range(2)]
    for count in (0, 1, 5, 6):
        unpatched.dataset.set_epoch(count)
        alone = epoch(unpatched).parts
        if count == 5:
            for loader in patched:
                loader.dataset.set_epoch(count)
        assert_read_of(alone, patched)
        seen.append(alone)
    assert all(one != other for one, other in combinations(seen, 2))
    for loader in patched:
        loader.set_epoch(5)
    assert_read_of(seen[2], patched)


def assert_read_of(alone: dict[int, list[Any]], patched: list[Any]) -> None:
    for rank, loader in enumerate(patched):
        expected = {worker: share(part, rank, len(patched), "pad") for worker, part in alone.items()}
        assert epoch(loader).parts == expected


# Real ranks.


def shuffled_without_a_seed(rank: int, world_size: int, tars: list[str]) -> list[int]:
    """What each rank gets where shards are shuffled by what differs between ranks."""
    seed_ambient(rank)
    loader: DataLoader[Any] = DataLoader(web(tars, shardshuffle=5), 2, num_workers=2)
    patched = patch_dataloader_to_ddp(loader, share="by_worker")
    return [int(number) for (batch,) in patched for number in batch]


def test_by_worker_needs_no_seed_where_shards_are_split_before_they_are_shuffled(tars: list[str]) -> None:
    """As docs/streams.md says of webdataset; ``test_stream_orders.py`` has what the default makes of it."""
    assert sorted({*chain(*run_ranks(shuffled_without_a_seed, 2, tars))}) == list(range(N))
