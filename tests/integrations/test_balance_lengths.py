"""``cost=`` on top of the sampler by which Hugging Face's ``Trainer`` groups samples by length."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

from ddp_patch import Cost, patch_dataloader_to_ddp

RANKS, BATCH, STEPS = 3, 4, 40
N = RANKS * BATCH * STEPS
LENGTHS = np.random.default_rng(0).lognormal(4, 1, N).astype(int) + 1
SHARES: list[dict[str, Any]] = [{"share": "batches"}, {"share": "samples"}]


def batches(rank: int, world_size: int, share: dict[str, Any], **balance: Any) -> list[list[int]]:
    """A rank's batches of an epoch, in a world given by hand."""
    sampler = LengthGroupedSampler(BATCH, lengths=LENGTHS.tolist())
    loader: DataLoader[Any] = DataLoader(range(N), BATCH, sampler=sampler)  # type: ignore[arg-type]
    patched = patch_dataloader_to_ddp(loader, seed=5, rank=rank, num_replicas=world_size, **share, **balance)
    return [batch.tolist() for batch in patched]


def slowest(ranks: list[list[list[int]]]) -> int:
    """The sum over steps of the slowest rank's padded batch."""
    costs = [[int(LENGTHS[batch].max()) * len(batch) for batch in rank] for rank in ranks]
    return sum(map(max, zip(*costs, strict=True)))


@pytest.mark.parametrize("share", SHARES, ids=lambda share: share["share"])
def test_each_sample_comes_once_in_steps_that_cost_alike(share: dict[str, Any]) -> None:
    today = [batches(rank, RANKS, share) for rank in range(RANKS)]
    balanced = [batches(rank, RANKS, share, cost=Cost(LENGTHS, of="padded")) for rank in range(RANKS)]
    least = sum(sorted((int(LENGTHS[batch].max()) * BATCH for batch in chain(*balanced)), reverse=True)[::RANKS])
    assert sorted(chain(*chain(*balanced))) == list(range(N))
    assert slowest(balanced) == least
    assert slowest(balanced) < slowest(today)


def test_whole_batches_are_those_of_one_process() -> None:
    alone = batches(0, 1, SHARES[0])
    balanced = [batches(rank, RANKS, SHARES[0], cost=Cost(LENGTHS, of="padded")) for rank in range(RANKS)]
    assert sorted(chain(*balanced)) == sorted(alone)
