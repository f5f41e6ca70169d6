"""Stopping anywhere and going on: in the same world exactly, in another one with nothing lost or repeated."""

import io
import json
import pickle
from itertools import islice
from typing import Any

import pytest
import torch
from test_contract import over
from torch.utils.data import DataLoader
from zoo import BY_NAME, KINDS, STEPS, Kind, comparable, loader, seed_ambient

from ddp_patch import (
    loader_state,
    patch_dataloader_to_ddp,
    restore_loader,
)

pytestmark = pytest.mark.filterwarnings("ignore::ddp_patch.StreamLengthWarning")  # some kinds have it

AGAIN = [kind for kind in KINDS if kind.epochs > 1 and "count" not in kind.name]  # no iterators


def patched(kind: Kind, rank: int = 0, num_replicas: int = 1, **options: Any) -> DataLoader[Any]:
    seed_ambient(1000 * num_replicas + rank)
    return patch_dataloader_to_ddp(kind.make(), rank=rank, num_replicas=num_replicas, seed=7, **options)


def batches_of(kind: Kind, given: Any, steps: int | None = None) -> list[Any]:
    batches = list(islice(given, STEPS) if kind.endless else islice(given, steps))
    if given.batch_sampler is None and not kind.batches:
        return [comparable(item) for item in batches]
    return [[comparable(item) for item in batch] for batch in batches]


def as_saved(state: dict[str, Any]) -> Any:
    """The state by way of a file, in each of the three forms."""
    if not state["samplers"]:
        assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded == state
    return pickle.loads(pickle.dumps(loaded))  # noqa: S301 - our own


def restored(kind: Kind, state: dict[str, Any], rank: int = 0, num_replicas: int = 1, **options: Any) -> Any:
    again = patched(kind, rank, num_replicas, **options)
    restore_loader(again, as_saved(state))
    return again


@over(AGAIN)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_rest_and_all_that_follows_are_those_of_a_run_that_was_never_stopped(kind: Kind, num_replicas: int) -> None:
    whole = patched(kind, num_replicas - 1, num_replicas)
    epochs = [batches_of(kind, whole) for _ in range(3)]
    stops = sorted({0, 1, len(epochs[1]) // 2, len(epochs[1]) - 1, len(epochs[1])} & set(range(len(epochs[1]) + 1)))
    for stop in stops:
        running = patched(kind, num_replicas - 1, num_replicas)
        batches_of(kind, running)
        iterator = iter(running) if stop else iter(())
        list(islice(iterator, stop))
        state = loader_state(running, batches_done=stop)
        again = restored(kind, state, num_replicas - 1, num_replicas)
        left = epochs[1][stop:]
        if kind.endless:
            assert batches_of(kind, again)[: len(left)] == left
            continue
        if not left and state["epoch"] == 1 and epochs[1]:
            assert not kind.sized  # where the end is not known, nothing is left of the epoch
            assert batches_of(kind, again) == []
        expected = [epochs[1][stop:], epochs[2]] if left else [epochs[2]]
        for batches in expected:
            if kind.sized:
                assert len(again) == len(batches)
            assert batches_of(kind, again) == batches
        del iterator


@pytest.mark.parametrize("name", ["shuffle=True, generator", "own numpy Generator", "P x K batches"])
def test_prefetching_by_workers_does_not_count(name: str) -> None:
    kind = BY_NAME[name]

    def start() -> Any:
        given = kind.make()
        options: Any = {"batch_sampler": given.batch_sampler} if kind.batches else {"sampler": given.sampler}
        workers: Any = loader(
            None if kind.batches else 4, num_workers=2, prefetch_factor=3, generator=given.generator, **options
        )
        return patch_dataloader_to_ddp(workers, rank=0, num_replicas=2, seed=7)

    whole = start()
    epochs = [list(whole) for _ in range(2)]
    running = start()
    states = [loader_state(running, batches_done=step + 1) for step, _ in enumerate(running)]
    for step, state in enumerate(states):
        again = start()
        restore_loader(again, as_saved(state))
        expected = [epochs[0][step + 1 :], epochs[1]] if step + 1 < len(epochs[0]) else [epochs[1]]
        assert [list(again) for _ in expected] == expected
