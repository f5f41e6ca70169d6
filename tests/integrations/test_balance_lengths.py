"""``cost=`` on top of the sampler by which Hugging Face's ``Trainer`` groups samples by length."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from quick import run_ranks
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler
from zoo import seed_ambient

from ddp_patch import Cost, patch_dataloader_to_ddp

RANKS, BATCH, STEPS = 3, 4, 40
N = RANKS * BATCH * STEPS
LENGTHS = np.random.default_rng(0).lognormal(4, 1, N).astype(int) + 1
SHARES: list[dict[str, Any]] = [{"share": "batches"}, {"share": "samples"}]


def batches(rank: int, world_size: int, share: dict[str, Any], **balance: Any) -> list[list[int]]:
    """A rank's batches of an epoch, in a world given by hand."""
    return epochs(share, 1, rank=rank, num_replicas=world_size, **balance)[0]


def epochs(share: dict[str, Any], number: int, **options: Any) -> list[list[list[int]]]:
    sampler = LengthGroupedSampler(BATCH, lengths=LENGTHS.tolist())
    loader: DataLoader[Any] = DataLoader(range(N), BATCH, sampler=sampler)  # type: ignore[arg-type]
    patched = patch_dataloader_to_ddp(loader, seed=5, **share, **options)
    return [[batch.tolist() for batch in patched] for _ in range(number)]


def on_rank(rank: int, world_size: int) -> list[list[list[list[int]]]]:
    seed_ambient(rank)
    return [epochs(share, 2, cost=Cost(LENGTHS, of="padded")) for share in SHARES]


def slowest(ranks: list[list[list[int]]]) -> int:
    """The sum over steps of the slowest rank's padded batch."""
    costs = [[int(LENGTHS[batch].max()) * len(batch) for batch in rank] for rank in ranks]
    return sum(map(max, zip(*costs, strict=True)))


def test_each_sample_comes_once_on_real_ranks() -> None:
    ranks = run_ranks(on_rank, RANKS)
    for place, share in enumerate(SHARES):
        for epoch in range(2):
            given = [rank[place][epoch] for rank in ranks]
            assert sorted(chain.from_iterable(chain.from_iterable(given))) == list(range(N))
            assert [len(rank) for rank in given] == [STEPS] * RANKS
        first = [rank[place][0] for rank in ranks]
        assert first == [batches(rank, RANKS, share, cost=Cost(LENGTHS, of="padded")) for rank in range(RANKS)]
        assert first != [rank[place][1] for rank in ranks]


@pytest.mark.parametrize("share", SHARES, ids=lambda share: share["share"])
def test_steps_cost_alike(share: dict[str, Any]) -> None:
    today = [batches(rank, RANKS, share) for rank in range(RANKS)]
    balanced = [batches(rank, RANKS, share, cost=Cost(LENGTHS, of="padded")) for rank in range(RANKS)]
    least = sum(sorted((int(LENGTHS[batch].max()) * BATCH for batch in chain(*balanced)), reverse=True)[::RANKS])
    assert slowest(balanced) == least
    assert slowest(balanced) < slowest(today)


def test_whole_batches_are_those_of_one_process() -> None:
    alone = batches(0, 1, SHARES[0])
    balanced = [batches(rank, RANKS, SHARES[0], cost=Cost(LENGTHS, of="padded")) for rank in range(RANKS)]
    assert sorted(chain(*balanced)) == sorted(alone)
