"""What users do after the patch, with the packages' own classes."""

from functools import partial
from typing import Any

from jobs import Job, Run, run_job, verdict
from lhotse import CutSet
from lhotse.cut import MonoCut
from lhotse.dataset.sampling import DynamicBucketingSampler, DynamicCutSampler, SimpleCutSampler
from quick import run_ranks
from torch.utils.data import DataLoader, Dataset

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
