"""What users do after the patch, with the packages' own classes."""

import os
from functools import partial
from typing import Any

import pytest
from jobs import Job, Run, run_job, verdict
from quick import run_ranks
from torch.utils.data import DataLoader, Dataset

from ddp_patch import patch_dataloader_to_ddp

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when datasets is imported: nothing here is downloaded

import datasets
from lhotse import CutSet
from lhotse.cut import MonoCut
from lhotse.dataset.sampling import DynamicBucketingSampler, DynamicCutSampler, SimpleCutSampler

N = 48


class Cuts(Dataset[Any]):
    """A batch is the numbers of its cuts."""

    def __getitem__(self, cuts: Any) -> list[int]:
        return [int(cut.id) for cut in cuts]


def drawn_by_the_systems_entropy(job: Job, kind: Any) -> None:
    """As lhotse's users do who want another order in each run: every rank draws its own."""
    cuts = CutSet.from_cuts(MonoCut(str(number), 0.0, 1.0 + number % 4, 0) for number in range(N)).to_eager()
    options = {"num_buckets": 3} if kind is DynamicBucketingSampler else {}
    seed = 0 if kind is SimpleCutSampler else "trng"
    sampler = kind(cuts, max_duration=8.0, shuffle=True, seed=seed, rank=0, world_size=1, **options)
    train = job.patch(DataLoader(Cuts(), batch_size=None, sampler=sampler))
    job.train(train, padding=N, epochs=3)


def on_rank(rank: int, world_size: int) -> list[Run]:
    return [
        run_job(rank, world_size, partial(drawn_by_the_systems_entropy, kind=kind))
        for kind in (SimpleCutSampler, DynamicCutSampler, DynamicBucketingSampler)
    ]


def test_lhotses_order_by_the_systems_entropy_loses_nothing_in_silence() -> None:
    seeded, *entropic = [verdict(runs) for runs in zip(*run_ranks(on_rank, 2), strict=True)]
    assert seeded == "complete"
    assert set(entropic) <= {"complete", "error"}


@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}],
    ids=["none", "one", "persistent"],
)
def test_the_own_set_epoch_of_hugging_faces_datasets_counts_after_the_patch(workers: dict[str, Any]) -> None:
    """As its documentation resumes a training: ``dataset.set_epoch(5)`` once; then an epoch follows the other."""

    def made() -> Any:
        shards = datasets.Dataset.from_dict({"number": range(N)}).to_iterable_dataset(num_shards=4)
        return DataLoader(shards.shuffle(seed=1, buffer_size=N), batch_size=4, **workers)

    def epochs(loader: Any) -> list[list[int]]:
        return [[number for batch in loader for number in batch["number"].tolist()] for _ in range(3)]

    alone = []
    for epoch in (5, 6, 7):
        loader = made()
        loader.dataset.set_epoch(epoch)
        alone.append([number for batch in loader for number in batch["number"].tolist()])
    ranks = [patch_dataloader_to_ddp(made(), rank=rank, num_replicas=2) for rank in range(2)]
    for rank in ranks:
        rank.dataset.set_epoch(5)
    shares = [epochs(rank) for rank in ranks]
    for whole, *parts in zip(alone, *shares, strict=True):
        assert sorted(parts[0] + parts[1]) == sorted(whole) == [*range(N)]
        if not workers:
            assert parts == [whole[rank::2] for rank in range(2)]
    again = [patch_dataloader_to_ddp(made(), rank=rank, num_replicas=2) for rank in range(2)]
    for loader in again:
        loader.set_epoch(5)
    assert [epochs(loader) for loader in again] == shares
    assert len({str(part) for part in shares[0]}) == len(shares[0])
