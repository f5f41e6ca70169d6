"""Patched loaders that several threads iterate at once: each draws its own order, or says what it waits for."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from messages import assert_tells
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.orders import random_states

N = 400


class Drawn(Sampler[int]):
    """Draws from the process's random states while somebody takes its items."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield random.randrange(N) + int(torch.randint(N, ()))


def patched(given: DataLoader[Any], seed: int = 0) -> Any:
    return patch_dataloader_to_ddp(given, rank=0, num_replicas=1, seed=seed)


def drawn(seed: int) -> list[int]:
    data: Any = range(2 * N)
    loader = patched(DataLoader(data, 2, sampler=Drawn()), seed)
    return [int(index) for _ in range(3) for batch in loader for index in batch]


def test_threads_that_iterate_loaders_at_once_draw_what_each_draws_alone() -> None:
    alone = [drawn(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(drawn, range(4))) == alone


class WaitsForAThread(IterableDataset[int]):
    """Gives what another thread takes of a loader of its own."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __iter__(self) -> Iterator[int]:
        found: list[list[int]] = []

        def work() -> None:
            try:
                found.append(drawn(1))
            except UnsupportedLoaderError as error:
                self.told.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        yield len(found)


def test_a_stream_that_waits_for_a_thread_which_iterates_another_loader_does_not_wait_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_states, "_WAITS_S", 0.5)
    dataset = WaitsForAThread()
    assert [batch.tolist() for batch in patched(DataLoader(dataset, 1))] == [[0]]
    (told,) = dataset.told
    assert_tells(told, ("to draw from Drawn", "reads WaitsForAThread", "random states"), "num_workers=1")
    apart: Any = DataLoader(WaitsForAThread(), 1, num_workers=1)
    assert [batch.tolist() for batch in patched(apart)] == [[0]]  # each waits in the worker: a process like any other
