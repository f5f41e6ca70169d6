"""How cost grows with n and the number of ranks, counted: what a rank draws, asks for and holds ahead."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from zoo import Indices, as_it_is

from ddp_patch import DDPSamplerWrapper, patch_dataloader_to_ddp
from ddp_patch.orders.chunks import MOST_AHEAD
from ddp_patch.positions_and_padding import Plan
from ddp_patch.samplers import ScalableRandomSampler
from ddp_patch.samplers.keyed import Permutation

RANKS = [1, 16, 1024, 16_384]
SIZES = [10**6, 10**9, 10**12]
BATCH = 64


def share_of(sampler: Any, world_size: int, **options: Any) -> DDPSamplerWrapper[Any]:
    return DDPSamplerWrapper(sampler, False, rank=world_size - 1, num_replicas=world_size, seed=0, **options)


class Source(Sampler[int]):
    """Any sampler: notes how much of it was drawn."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.drawn = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):
            self.drawn += 1
            yield index


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("n", SIZES)
def test_any_sampler_is_drawn_a_bounded_way_ahead(n: int, world_size: int) -> None:
    sampler = Source(n)
    wrapper = share_of(sampler, world_size, order="seeded")
    sampler.drawn = 0
    first = list(islice(iter(wrapper), BATCH))
    needed = min(n, world_size * BATCH)
    assert first == [position % n for position in Plan(world_size - 1, world_size).share(n)[:BATCH]]
    assert sampler.drawn <= needed + max(MOST_AHEAD, world_size)
    assert sampler.drawn <= 2 * needed


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("n", SIZES)
def test_a_sequential_sampler_is_not_drawn_at_all(n: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(sampler: Any) -> Any:
        raise AssertionError("its positions are its items")

    wrapper = share_of(SequentialSampler(range(n)), world_size)
    monkeypatch.setattr(SequentialSampler, "__iter__", drawn)
    assert list(islice(iter(wrapper), 3)) == list(range(world_size - 1, n, world_size)[:3])


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("n", SIZES)
def test_a_scalable_shuffle_computes_its_own_share(n: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0
    original = Permutation.__call__

    def counted(self: Permutation, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        nonlocal computed
        computed += len(positions)
        return original(self, positions)

    monkeypatch.setattr(Permutation, "__call__", counted)
    given: DataLoader[Any] = DataLoader(
        Indices(n), BATCH, sampler=ScalableRandomSampler(n, seed=1), collate_fn=as_it_is
    )
    patched = patch_dataloader_to_ddp(given, rank=1 % world_size, num_replicas=world_size)
    batches = patched.batch_sampler
    assert batches is not None
    taken = [index for batch in islice(iter(batches), 100) for index in batch]
    assert len(set(taken)) == len(taken) == min(100 * BATCH, -(-n // world_size))
    assert computed <= 2 * len(taken) + BATCH


def test_torchs_order_is_drawn_once_an_epoch_whatever_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    original = torch.randperm

    def counted(n: int, **options: Any) -> torch.Tensor:
        drawn.append(n)
        return original(n, **options)

    monkeypatch.setattr(torch, "randperm", counted)
    for world_size in RANKS:
        given: DataLoader[Any] = DataLoader(Indices(10_000), BATCH, shuffle=True, collate_fn=as_it_is)
        patched = patch_dataloader_to_ddp(given, rank=0, num_replicas=world_size)
        drawn.clear()
        list(patched)
        assert drawn == [10_000]


@pytest.mark.parametrize("own", [False, True])
def test_a_length_that_draws_is_guarded_whenever_it_is_asked_for(own: bool) -> None:
    class Drawing(Source):
        def __init__(self, n: int) -> None:
            super().__init__(n)
            self.generator = torch.Generator().manual_seed(1)

        def __len__(self) -> int:
            return 100 + int(torch.randint(2, (), generator=self.generator if own else None))

    sampler = Drawing(100)
    generator = sampler.generator
    given: DataLoader[int] = DataLoader(Indices(200), 1, sampler=sampler)
    loader = patch_dataloader_to_ddp(given, rank=0, num_replicas=1)
    before = torch.get_rng_state(), generator.get_state()
    lengths = [len(loader) for _ in range(20)]
    assert len(set(lengths)) == 1  # each time from the same state
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])
