"""Real ranks whose samplers or data are sharded already: known, or told."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from messages import Words, assert_tells
from quick import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler
from zoo import Indices, N

from ddp_patch import check_loaders_is_patched, patch_dataloader_to_ddp
from ddp_patch.errors import RankMismatchError


class Marked(Sampler[int]):
    """Shards by what it asks for when it is iterated, and says so."""

    is_ddp_aware = True

    def __len__(self) -> int:
        return -(-N // dist.get_world_size())

    def __iter__(self) -> Iterator[int]:
        ranks = dist.get_world_size()
        return (place % N for place in range(dist.get_rank(), len(self) * ranks, ranks))


class Made(Sampler[int]):
    """As mmengine's DefaultSampler."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.world_size = rank, ranks

    def __len__(self) -> int:
        return len(range(self.rank, N, self.world_size))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, N, self.world_size))


class Logging(Made):
    """Stores its rank for a log, and gives every rank all."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N).tolist())


class Part(Dataset[int]):
    """Holds one rank's part on purpose."""

    is_ddp_aware = True

    def __init__(self, data: list[int]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> int:
        return self.data[index]


def over(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Indices(), sampler=sampler, batch_size=4)


SAME: list[Words] = ["as it is"]
# A loader, given this rank and the number of ranks; and what it becomes, or what the ranks are told, before the remedy
# and of it. ``tests/unit/test_claims.py`` has more.
CASES: dict[str, tuple[Callable[[int, int], Any], list[Words]]] = {
    "marked": (lambda rank, ranks: over(Marked()), SAME),
    "made for this world": (lambda rank, ranks: over(Made(rank, ranks)), SAME),
    "made for a larger one": (
        lambda rank, ranks: over(Made(rank, 2 * ranks)),
        [("not for these 2 ranks", "rank 0 of 4 on rank 0", "rank 1 of 4 on rank 1"), ("own rank", "process_group=")],
    ),
    "made for one process": (lambda rank, ranks: over(Made(0, 1)), ["patched"]),
    "a DistributedSampler for one process": (
        lambda rank, ranks: over(DistributedSampler(Indices(), 1, 0)),
        ["patched"],
    ),
    "of the same seed": (lambda rank, ranks: over(DistributedSampler(Indices(), ranks, rank, seed=117)), SAME),
    "a DistributedSampler of a part": (
        lambda rank, ranks: DataLoader(part(rank, ranks), sampler=DistributedSampler(part(rank, ranks), ranks, rank)),
        ["the elements of a list", ("leave out a DistributedSampler", "is_ddp_aware = True")],
    ),
    "stored for a log": (
        lambda rank, ranks: over(Logging(rank, ranks)),
        [
            ("sharded already by Logging", "samples of rank", "are also rank"),
            ("same seed and epoch", "is_ddp_aware = False"),
        ],
    ),
    "a list": (
        lambda rank, ranks: DataLoader(part(rank, ranks)),
        [("rank 0 and rank 1", "the elements of a list"), "data[rank::world_size]"],
    ),
    "a part on purpose": (lambda rank, ranks: DataLoader(Part(part(rank, ranks))), SAME),
}


def part(rank: int, ranks: int) -> Any:
    return [*range(100)][rank::ranks]


def outcomes(rank: int, ranks: int) -> dict[str, tuple[str, bool]]:
    """What each loader became, and whether it counts as patched; or an error."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # webdataset looks at these first
    told = {}
    for name, (make, _) in CASES.items():
        given = make(rank, ranks)
        try:
            patched = patch_dataloader_to_ddp(given)
            is_same = patched.sampler is given.sampler and patched.dataset is given.dataset
            told[name] = "as it is" if is_same else "patched", check_loaders_is_patched(patched)
            for _ in range(3):
                list(patched)
        except RankMismatchError as error:
            told[name] = str(error), False
    return told


class RASampler(Made):
    """Repeats each sample on all ranks, which augment it differently."""

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


def in_common(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    everything: Any = DistributedSampler(Indices(100), 1, 0)
    replicated = patch_dataloader_to_ddp(DataLoader(Indices(100), 4, sampler=everything), device_mesh=mesh)
    repeated = patch_dataloader_to_ddp(DataLoader(Indices(100), 4, sampler=RASampler(rank, ranks)))
    for _ in range(3):
        for loader in (replicated, repeated):
            list(loader)
            dist.barrier()


def test_ranks_that_replicate_each_other_and_repeated_augmentation_may_have_all_in_common() -> None:
    run_ranks(in_common, 2)


def test_what_is_sharded_already_is_known_or_told() -> None:
    first, second = run_ranks(outcomes, 2)
    for name, (_, expected) in CASES.items():
        said, counts = max(first[name], second[name], key=lambda outcome: len(outcome[0]))
        if name != "stored for a log":  # of which a rank that has ended hears nothing
            assert first[name] == second[name]
        if len(expected) == 1:
            assert ([said], counts) == (expected, True), name
        else:
            assert_tells(said, *expected)
