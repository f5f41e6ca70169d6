"""Hugging Face's datasets: map-style and streamed ones, which split themselves over a loader's workers."""

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from messages import assert_tells
from quick import run_ranks
from torch.utils.data import ChainDataset, DataLoader
from zoo import N, assert_shared_exactly, seed_ambient

from ddp_patch import DDPPatchError, check_loaders_is_patched, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.compat.private_packages import loses_items_when_loaded
from ddp_patch.loaders.columns import columns_of
from ddp_patch.sharding.values_as_text import from_text

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when datasets is imported: nothing here is downloaded

import datasets
from datasets.distributed import split_dataset_by_node

SHARDS = [range(6), range(6, 12), range(12, 18), range(18, N)]


def map_style() -> Any:
    return datasets.Dataset.from_dict({"number": range(N)})


def streamed() -> Any:
    return map_style().to_iterable_dataset(num_shards=len(SHARDS))


def generated(reads: Path | None = None) -> Any:
    return datasets.IterableDataset.from_generator(read, gen_kwargs={"shards": SHARDS, "reads": reads})


def read(shards: list[range], reads: Path | None) -> Iterator[dict[str, int]]:
    """Yield the shards' numbers, noting each in a file that all processes append to."""
    for shard in shards:
        for number in shard:
            if reads is not None:
                with reads.open("a") as file:
                    file.write(f"{number}\n")
            yield {"number": number}


def loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=3, **options)


def numbers(batch: Any) -> list[int]:
    listed: list[int] = batch["number"].tolist()
    return listed


class Locked:
    """A transform that holds what cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, rows: Any) -> Any:
        return rows


def test_which_rows_a_dataset_holds_is_told_whatever_its_transform_holds() -> None:
    whole, half = map_style().with_transform(Locked()), map_style().select(range(10)).with_transform(Locked())
    assert columns_of(whole)
    assert columns_of(whole) == columns_of(map_style()) != columns_of(half)


def set_epoch_slowly(self: Any, epoch: int) -> None:
    """As that of datasets 5.2, which adds a difference to a number in memory shared by all workers; but slower."""
    difference = epoch - self._epoch
    time.sleep(0.1)
    self._epoch += difference


def test_workers_do_not_set_the_epoch_in_each_others_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.IterableDataset, "set_epoch", set_epoch_slowly)
    source = streamed().shuffle(seed=1, buffer_size=5)
    # Forked workers have the slow one as well.
    given = loader(source, num_workers=2, multiprocessing_context="fork")
    patched = patch_dataloader_to_ddp(given, rank=0, num_replicas=1)
    for epoch in range(2):
        assert_shared_exactly([[number for batch in patched for number in numbers(batch)]], N)
        assert source.epoch == epoch


def on_rank(rank: int, world_size: int, persistent: bool) -> tuple[list[list[int]], list[tuple[bool, str]]]:
    seed_ambient(100 + rank)
    dataset = streamed().shuffle(seed=1, buffer_size=5)
    patched = patch_dataloader_to_ddp(loader(dataset, num_workers=2, persistent_workers=persistent))
    epochs = [[number for batch in patched for number in numbers(batch)] for _ in range(3)]
    whole_stream = loader(split_dataset_by_node(dataset, 0, 1))  # which splits nothing
    assert not check_loaders_is_patched(whole_stream)
    of_one_node = [number for batch in patch_dataloader_to_ddp(whole_stream, seed=0) for number in numbers(batch)]
    assert len(of_one_node) == -(-N // world_size)
    epochs.append(of_one_node)
    split = partial(split_dataset_by_node, rank=rank, world_size=world_size)
    whole, halves = map_style(), map_style().select(range(N - 1))
    splits = [split(dataset) for dataset in (whole, halves, halves.shuffle(seed=1), streamed())]
    return epochs, [told(dataset) for dataset in (*splits, ChainDataset([streamed(), splits[-1]]))]


def told(dataset: Any) -> tuple[bool, str]:
    """Whether a loader of the dataset counts as sharded, and what the patch says of it."""
    with pytest.raises(DDPPatchError) as caught:
        patch_dataloader_to_ddp(loader(dataset))
    return check_loaders_is_patched(loader(dataset)), str(caught.value)


def test_real_ranks() -> None:
    """What was split by node is refused by name: a map-style share bears no mark, but the ranks' rows differ."""
    (first, said), (second, said_by_second) = run_ranks(on_rank, 2, True)
    for shares in zip(first, second, strict=True):
        assert_shared_exactly(list(shares), N)
    assert first[0] != first[1] != first[2]
    assert said == said_by_second
    *map_styles, (iterable_counts, iterable), (within_counts, within) = said
    for counts, message in map_styles:
        assert not counts
        assert_tells(message, "datasets of rank 0 and rank 1", "without split_dataset_by_node()")
    assert iterable_counts
    assert within_counts
    for message in (iterable, within):
        assert_tells(message, "split_dataset_by_node()", "whole dataset")


def mapped(**options: Any) -> Any:
    return generated().map(lambda batch: batch, **options)


def mixed() -> Any:
    return datasets.interleave_datasets([generated(), streamed()], probabilities=[0.7, 0.3], seed=1)


RESUMED: dict[str, Callable[[], Any]] = {
    "generated": generated,
    "of a table": streamed,
    "of a table, as tensors": lambda: streamed().with_format("torch"),
    "mapped": mapped,
    "mapped in batches": partial(mapped, batched=True, batch_size=4),
    "filtered": lambda: generated().filter(lambda sample: sample["number"] % 5),
    "mixed": mixed,
    "skipped and cut": lambda: generated().skip(2).take(20),
    "repeated": lambda: streamed().repeat(2),
    "shards shuffled": lambda: generated().shuffle(seed=1, buffer_size=1),
    "shuffled": lambda: generated().shuffle(seed=1, buffer_size=5),
    "shuffled, then mapped": lambda: mapped().shuffle(seed=1, buffer_size=5).map(lambda sample: sample),
}


# With workers, which take long to start, the session soak tries most.
SOONER = {"generated", "mapped in batches", "shuffled, then mapped"}
CASES = [
    pytest.param(make, workers, marks=[pytest.mark.soak] * bool(workers and name not in SOONER), id=f"{name}-{workers}")
    for name, make in RESUMED.items()
    for workers in (0, 2)
]


@pytest.mark.parametrize(("make", "workers"), CASES)
def test_stopped_and_resumed_it_goes_on_as_if_never_stopped(make: Any, workers: int) -> None:
    """By its own state, but not where that would lose what a buffer of samples held."""

    def start(state: Any = None) -> Any:
        patched = patch_dataloader_to_ddp(loader(make(), num_workers=workers), rank=1, num_replicas=2)
        if state is not None:
            restore_loader(patched, json.loads(json.dumps(state)))
        return patched

    running = start()
    whole = [[numbers(batch) for batch in running] for _ in range(2)]
    state, own = None, []
    for done in range(3):
        stopped = start(state)
        assert [numbers(batch) for batch in islice(stopped, 1)] == whole[0][done : done + 1]
        state = loader_state(stopped, batches_done=1)
        own += [state for _, state, _ in from_text(state["states"])["streams"] if state]
        # What was left joins its threads when it is collected. If that happens while another thread starts, both wait.
        gc.collect()
    resumed = start(state)
    assert [[numbers(batch) for batch in resumed] for _ in range(2)] == [whole[0][3:], whole[1]]
    assert bool(own) != loses_items_when_loaded(make())


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_that_were_done_are_not_read_again(workers: int, tmp_path: Path) -> None:
    def start(reads: Path) -> Any:
        return patch_dataloader_to_ddp(loader(generated(reads), num_workers=workers), rank=0, num_replicas=1)

    stopped = start(tmp_path / "before")
    list(islice(stopped, 6))
    resumed = start(tmp_path / "after")
    restore_loader(resumed, loader_state(stopped, batches_done=6))
    assert sum(len(numbers(batch)) for batch in resumed) == N - 18
    # The package begins the shard anew in which a worker stood: 2 and 3, of which a sample has been done or more.
    assert set(map(int, (tmp_path / "after").read_text().split())).isdisjoint(range(12))


def test_an_epoch_that_is_begun_again_after_a_resume_is_whole() -> None:
    """The package would begin it where the state was loaded."""
    patched: Any = patch_dataloader_to_ddp(loader(generated()), rank=0, num_replicas=1)
    list(islice(patched, 3))
    restore_loader(patched, loader_state(patched, batches_done=3))
    list(islice(patched, 1))
    patched.set_epoch(0)
    assert [number for batch in patched for number in numbers(batch)] == list(range(N))
