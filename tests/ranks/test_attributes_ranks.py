"""What all ranks change through the loader after the patch counts on all of them, from the next pass on."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from quick import run_ranks
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler
from zoo import as_it_is, seed_ambient

from ddp_patch import patch_dataloader_to_ddp

N = 48


class Growing(Sampler[int]):
    """Yields 8 more in each pass, until somebody starts over."""

    def __init__(self) -> None:
        self.size, self.shuffle = 8, True

    def __iter__(self) -> Iterator[int]:
        size = self.size
        self.size += 8
        yield from torch.randperm(size).tolist() if self.shuffle else range(size)

    def start_over(self) -> None:
        self.size = 8


def curricula(rank: int, world_size: int) -> dict[str, list[list[int]]]:
    return {share: changed(rank, share) for share in ("samples", "batches", "within_batches")}


def changed(rank: int, share: Any) -> list[list[int]]:
    seed_ambient(100 + rank)

    def patched(**options: Any) -> Any:
        given: Any = DataLoader(range(N), batch_size=4, collate_fn=as_it_is, **options)  # type: ignore[arg-type]
        return patch_dataloader_to_ddp(given, share=share)

    growing, weighted = patched(sampler=Growing()), patched(sampler=WeightedRandomSampler([1.0] * N, N))
    epochs = [[*chain(*growing)], [*chain(*growing)]]
    if rank == 0:
        assert [*growing.sampler.sampler]  # a look, which moves nothing
    growing.sampler.start_over()
    epochs.append([*chain(*growing)])
    growing.sampler.shuffle = False
    epochs.append([*chain(*growing)])
    assert [*chain(*weighted)]
    weighted.sampler.weights = torch.tensor([0.0] * (N - 1) + [1.0])
    return [*epochs, [*chain(*weighted)]]


def test_all_ranks_change_a_sampler() -> None:
    first, second = run_ranks(curricula, 2)
    for share in first:
        ranks = first[share], second[share]
        *growing, weighted = [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]
        assert growing == [[*range(8)], [*range(16)], [*range(8)], [*range(16)]], share
        assert ranks[0][3] == sorted(ranks[0][3]), share
        assert set(weighted) == {N - 1}, share
        assert [len(epoch) for epoch in ranks[0]] == [len(epoch) for epoch in ranks[1]], share
