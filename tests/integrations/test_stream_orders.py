"""webdataset's and Hugging Face's streams, which every rank shuffles by a generator of its own unless it is seeded."""

import os
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from messages import assert_tells
from quick import run_ranks, soaked
from third_party.base import tars
from told import FOUND, WARNED, Told, in_step
from torch.utils.data import DataLoader, IterableDataset
from worlds import assert_shared_exactly
from zoo import as_it_is, seed_ambient

from ddp_patch import patch_dataloader_to_ddp

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when datasets is imported: nothing here is downloaded

import datasets
import webdataset as wds

N = 300
SHARDS = 6
STEPS = 12  # of 16 samples on each of two ranks, and more than an epoch has


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tars(tmp_path_factory.mktemp("shards"), (range(shard, N, SHARDS) for shard in range(SHARDS)))


def web(shards: list[str], shardshuffle: int | bool = False, **options: Any) -> Any:
    return wds.WebDataset(shards, nodesplitter=None, shardshuffle=shardshuffle, **options).decode()


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "noise": np.random.default_rng().random(), "crop": random.Random().randrange(10**9)}


def noisy_rows(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "noise": np.random.default_rng().random()}


def noise_alone(row: dict[str, Any]) -> dict[str, Any]:
    return {"noise": row["cls"] + np.random.default_rng().random()}


class Wrapped(IterableDataset[Any]):
    """As users wrap a package's dataset."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


WEB: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "shuffle": (lambda shards: web(shards).shuffle(100), FOUND),
    "shuffle, tuples": (lambda shards: web(shards).shuffle(100).to_tuple("cls"), FOUND),
    "shuffle over all": (lambda shards: web(shards).shuffle(1000), FOUND),
    "shuffle, augmented": (lambda shards: web(shards).shuffle(1000).map(noisy), FOUND),
    "shuffle, wrapped": (lambda shards: Wrapped(web(shards).shuffle(100).to_tuple("cls")), FOUND),
    "shards shuffled": (lambda shards: web(shards, shardshuffle=SHARDS), FOUND),
    "shards shuffled by detshuffle alone": (lambda shards: web(shards, shardshuffle=SHARDS, detshuffle=True), FOUND),
    "in order": (web, ""),
    "augmented": (lambda shards: web(shards).map(noisy), ""),
    "remedy for shards": (lambda shards: web(shards, shardshuffle=100, detshuffle=True, seed=0), ""),
    "remedy for samples": (lambda shards: web(shards).compose(wds.detshuffle(1000, seed=0)), ""),
    "second remedy for samples": (lambda shards: web(shards).shuffle(1000, seed=0), ""),
}


def rows(numbers: range = range(N)) -> Any:
    table = {"cls": numbers, "text": [f"line {number}" for number in numbers]}
    return datasets.Dataset.from_dict(table).to_iterable_dataset(4)


def mixed(seed: int | None) -> Any:
    halves = [rows(range(N // 2)), rows(range(N // 2, N))]
    return datasets.interleave_datasets(halves, [0.5, 0.5], seed=seed, stopping_strategy="all_exhausted")


HUGGING_FACE: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffle": (lambda: rows().shuffle(buffer_size=100), FOUND),
    "shuffle over all": (lambda: rows().shuffle(buffer_size=1000), FOUND),
    "shuffle, augmented": (lambda: rows().shuffle(buffer_size=100).map(noisy_rows), FOUND),
    "shuffle, tensors": (lambda: rows().select_columns(["cls"]).shuffle(buffer_size=100).with_format("torch"), FOUND),
    "in order": (rows, ""),
    "augmented": (lambda: rows().map(noisy_rows), ""),
    "augmented tensors": (lambda: rows().select_columns(["cls"]).map(noisy_rows).with_format("torch"), ""),
    "no names": (lambda: rows().map(noise_alone, remove_columns=["cls", "text"]).with_format("torch"), WARNED),
    "interleaved": (lambda: mixed(3), ""),
    "shuffled by a generator": (lambda: rows().shuffle(buffer_size=100, generator=np.random.default_rng(5)), ""),
    "remedy": (lambda: rows().shuffle(seed=0, buffer_size=1000), ""),
}


def watched(rank: int, world_size: int, shards: list[str]) -> dict[tuple[str, str, int], Told]:
    told = {}
    seed_ambient(rank)
    given = {("web", name): make(shards) for name, (make, _) in WEB.items()}
    given |= {("hf", name): make() for name, (make, _) in HUGGING_FACE.items()}
    for (package, name), dataset in given.items():
        for workers in (0, 2) if world_size == 2 else (0,):
            seed_ambient(rank)
            loader: DataLoader[Any] = DataLoader(dataset, batch_size=16, collate_fn=as_it_is, num_workers=workers)
            seen = in_step(patch_dataloader_to_ddp(loader), STEPS)
            told[package, name, workers] = seen._replace(batches=list(map(number_of, chain(*seen.batches))))
    return told


def number_of(item: Any) -> int:
    return int(item[0] if isinstance(item, tuple) else item.get("cls", item.get("noise")))


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_the_order_that_each_rank_draws_for_itself_is_found_and_the_remedies_work(
    shards: list[str], world_size: int
) -> None:
    ranks = run_ranks(watched, world_size, shards)
    expected = {("web", name): found for name, (_, found) in WEB.items()}
    expected |= {("hf", name): found for name, (_, found) in HUGGING_FACE.items()}
    wrong = []
    for case in ranks[0]:
        seen, wanted = [told[case] for told in ranks], expected[case[:2]]
        found = {told.found for told in seen}
        if wanted not in found or not found <= ({WARNED, ""} if wanted == WARNED else {wanted}):
            wrong.append((case, [(told.found, told.message) for told in seen]))
        elif not wanted and case[1] != "interleaved":  # which repeats some
            assert_shared_exactly([told.batches for told in seen], N)
    assert not wrong
    seeds = ("detshuffle=True, seed=0", ".compose(webdataset.detshuffle(1000, seed=0))", ".shuffle(1000, seed=0)")
    assert_tells(ranks[0]["web", "shuffle", 0].message, ("WebDataset", "rank", "lost"), seeds)
    assert_tells(ranks[0]["web", "shuffle, wrapped", 0].message, ("Wrapped", "rank", "lost"), seeds)
    assert_tells(
        ranks[0]["hf", "shuffle", 0].message,
        ("IterableDataset", "rank", "lost"),
        (".shuffle(seed=0, buffer_size=1000)",),
    )


class Unpacks:
    """Finds one sample corrupt, as on one rank's disk."""

    def __init__(self, corrupt: str) -> None:
        self.corrupt = corrupt

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["__key__"] == self.corrupt:
            raise ValueError(f"{self.corrupt} is corrupt")
        return row


def skipping(rank: int, world_size: int, shards: list[str], on: str) -> list[Told]:
    """Every rank, or one, skips a sample that comes after the first ones, which are compared one by one."""
    seed_ambient(rank)
    told = []
    for workers in (0, 2):
        unpacks = Unpacks("0125" if on == "every rank" or rank == 1 else "")
        data = wds.WebDataset(shards, nodesplitter=None, shardshuffle=False)
        data = data.map(unpacks, handler=wds.handlers.warn_and_continue).decode().to_tuple("cls")
        loader: DataLoader[Any] = DataLoader(data, batch_size=16, collate_fn=as_it_is, num_workers=workers)
        told.append(in_step(patch_dataloader_to_ddp(loader), STEPS)._replace(batches=[]))
    return told


@pytest.mark.parametrize(("on", "found"), [("every rank", ""), ("one rank", FOUND)])
def test_a_sample_that_webdataset_skips_is_told_within_the_epoch_if_only_one_rank_skips_it(
    shards: list[str], on: str, found: str
) -> None:
    for told in zip(*run_ranks(skipping, 2, shards, on), strict=True):
        seen = {rank.found for rank in told}
        assert found in seen
        assert seen <= {found, ""}  # of the last comparison, the first rank that makes it has nothing to compare with
