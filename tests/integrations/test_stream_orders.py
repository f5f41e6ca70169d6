"""webdataset's and Hugging Face's streams, which every rank shuffles by a generator of its own unless it is seeded."""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import users
from jobs import Job, Programs
from quick import soaked
from third_party.base import files, tars
from torch.utils.data import IterableDataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when datasets is imported: nothing here is downloaded

import datasets
import webdataset as wds

program = Programs(__name__)
Make = Callable[[], Any]
N = 300
SHARDS = 6


def web(shardshuffle: int | bool = False, **options: Any) -> Any:
    written = (range(shard, N, SHARDS) for shard in range(SHARDS))
    shards = sorted(map(str, files("stream orders", lambda folder: tars(folder, written)).iterdir()))
    return wds.WebDataset(shards, nodesplitter=None, shardshuffle=shardshuffle, **options).decode()


def rows(numbers: range = range(N)) -> Any:
    table = {"cls": numbers, "text": [f"line {number}" for number in numbers]}
    return datasets.Dataset.from_dict(table).to_iterable_dataset(4)


def mixed() -> Any:
    halves = [rows(range(N // 2)), rows(range(N // 2, N))]
    return datasets.interleave_datasets(halves, [0.5, 0.5], seed=3, stopping_strategy="all_exhausted")


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "noise": np.random.default_rng().random(), "crop": random.Random().randrange(10**9)}


def noisy_number(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "noise": np.random.default_rng().random()}


def noise_alone(row: dict[str, Any]) -> dict[str, Any]:
    return {"noise": row["cls"] + np.random.default_rng().random() / 2}  # a float32 may be rounded up


class Wrapped(IterableDataset[Any]):
    """As users wrap a package's dataset."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def train(job: Job, stream: Any, due: Iterable[int] = range(N), **how: Any) -> None:
    """Without workers, and on two ranks with some."""
    for workers in (0, 2) if job.world == 2 else (0,):
        job.train(job.patch(users.loader(stream, batch_size=16, num_workers=workers)), due, **how)


SEED = "detshuffle=True, seed=0"
OF_WEB: dict[str, Make] = {
    "samples": lambda: web().shuffle(100),
    "all samples": lambda: web().shuffle(1000),
    "augmented": lambda: web().shuffle(1000).map(noisy),
    "shards": lambda: web(SHARDS),
    "shards, by detshuffle alone": lambda: web(SHARDS, detshuffle=True),
}


@program("error", each=OF_WEB, tells=("WebDataset", "rank", "lost", SEED))
def webdataset_shuffles_by_itself(job: Job, make: Make) -> None:
    train(job, make())


# Numbers alone differ where each rank augments, too.
NUMBERS = ("rank", "other numbers", "lost")


@program("warned", tells=("WebDataset", *NUMBERS, SEED))
def webdataset_without_names_shuffles_by_itself(job: Job) -> None:
    train(job, web().shuffle(100).to_tuple("cls"))


@program("warned", tells=("Wrapped", *NUMBERS, SEED))
def a_wrapped_webdataset_shuffles_by_itself(job: Job) -> None:
    train(job, Wrapped(web().shuffle(100).to_tuple("cls")))


OF_ROWS: dict[str, Make] = {
    "rows": lambda: rows().shuffle(buffer_size=100),
    "all rows": lambda: rows().shuffle(buffer_size=1000),
    "augmented": lambda: rows().shuffle(buffer_size=100).map(noisy),
}


@program("error", each=OF_ROWS, tells=("IterableDataset", "rank", "lost", "Give each of its shuffles a seed"))
def hugging_face_shuffles_by_itself(job: Job, make: Make) -> None:
    train(job, make())


@program("warned", tells=("IterableDataset", *NUMBERS))
def hugging_face_tensors_shuffle_by_themselves(job: Job) -> None:
    train(job, rows().select_columns(["cls"]).shuffle(buffer_size=100).with_format("torch"))


WEB_ALIKE: dict[str, Make] = {
    "in order": web,
    "augmented": lambda: web().map(noisy),
    "the remedy for shards": lambda: web(100, detshuffle=True, seed=0),
    "the remedy for samples": lambda: web().compose(wds.detshuffle(1000, seed=0)),
    "the second remedy for samples": lambda: web().shuffle(1000, seed=0),
}
ROWS_ALIKE: dict[str, Make] = {
    "in order": rows,
    "tensors augmented": lambda: rows().select_columns(["cls"]).map(noisy_number).with_format("torch"),
    "shuffled by a generator": lambda: rows().shuffle(buffer_size=100, generator=np.random.default_rng(5)),
    "the remedy": lambda: rows().shuffle(seed=0, buffer_size=1000),
}


@program("complete", each=WEB_ALIKE)
def all_ranks_read_webdataset_alike(job: Job, make: Make) -> None:
    train(job, make())


@program("complete", each=ROWS_ALIKE)
def all_ranks_read_rows_alike(job: Job, make: Make) -> None:
    train(job, make())


@program("complete")
def rows_are_interleaved(job: Job) -> None:
    train(job, mixed(), padding=N)  # some are repeated


@program("complete", tells=NUMBERS)
def rows_with_names_have_augmented_numbers(job: Job) -> None:
    train(job, rows().map(noisy))


@program("complete", tells=NUMBERS)
def rows_have_no_names(job: Job) -> None:
    train(job, rows().map(noise_alone, remove_columns=["cls", "text"]).with_format("torch"))


def unpack(corrupt: str, row: dict[str, Any]) -> dict[str, Any]:
    """Find one sample corrupt, as on one rank's disk; it comes after the first ones, which are compared one by one."""
    if row["__key__"] == corrupt:
        raise ValueError(f"{corrupt} is corrupt")
    return row


def skipping(corrupt: str) -> Any:
    unpacked = web().map(partial(unpack, corrupt), handler=wds.handlers.warn_and_continue)
    return unpacked.to_tuple("cls")


@program("complete")
def webdataset_skips_a_sample_on_every_rank(job: Job) -> None:
    train(job, skipping("0125"), set(range(N)) - {125}, padding=1)


@program("error")
def webdataset_skips_a_sample_on_one_rank(job: Job) -> None:
    train(job, skipping("0125" if job.rank == 1 else ""))


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_the_order_that_each_rank_draws_for_itself_is_found_and_the_remedies_work(world_size: int) -> None:
    web()  # writes the files that all ranks read
    assert program.unexpected(world_size) == {}
