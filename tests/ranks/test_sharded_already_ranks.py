"""Real ranks whose samplers or data are sharded already: known, or told before anything is lost."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from messages import assert_tells
from quick import run_each, run_ranks
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)
from zoo import Indices, N

from ddp_patch import DDPPatchError, check_loaders_is_patched, patch_dataloader_to_ddp


class Striding(Sampler[int]):
    """Shards by what it asks for when it is iterated, and holds no number of it."""

    def __len__(self) -> int:
        return len(range(dist.get_rank(), N, dist.get_world_size()))

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), N, dist.get_world_size()))


class Padded(Striding):
    """Repeats the first samples, so that all ranks have equally many."""

    def __len__(self) -> int:
        return -(-N // dist.get_world_size())

    def __iter__(self) -> Iterator[int]:
        ranks = dist.get_world_size()
        return (place % N for place in range(dist.get_rank(), len(self) * ranks, ranks))


class Marked(Padded):
    is_ddp_aware = True


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


class Runs(Made):
    """By ceil(N / ranks), so that the last rank has fewer."""

    def __len__(self) -> int:
        return len([*iter(self)])

    def __iter__(self) -> Iterator[int]:
        each = -(-N // self.world_size)
        return iter(range(self.rank * each, min(N, (self.rank + 1) * each)))


class Part(Dataset[int]):
    """Holds one rank's part on purpose."""

    is_ddp_aware = True

    def __init__(self, data: list[int]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> int:
        return self.data[index]


def split_by_node(source: Any) -> Any:
    return source


class Pipeline(IterableDataset[int]):
    """As webdataset's."""

    def __init__(self) -> None:
        self.pipeline = [split_by_node]

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), N, dist.get_world_size()))


def over(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Indices(), sampler=sampler, batch_size=4)


def outcomes(rank: int, ranks: int) -> dict[str, tuple[str, str]]:
    """What each loader became: a copy as it is, patched, or an error."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # webdataset looks at these first
    half: Any = [*range(100)][rank::ranks]
    makers: dict[str, Callable[[], Any]] = {
        "by itself": lambda: over(Padded()),
        "by indices": lambda: over(SubsetRandomSampler([*range(N - 1)][rank::ranks])),
        "marked": lambda: over(Marked()),
        "made for this world": lambda: over(Made(rank, ranks)),
        "made for a larger one": lambda: over(Made(rank, 2 * ranks)),
        "made for rank 0 everywhere": lambda: over(Made(0, ranks)),
        "made for one process": lambda: over(Made(0, 1)),
        "of another seed": lambda: over(DistributedSampler(Indices(), ranks, rank, seed=117 + 17 * rank)),
        "of the same seed": lambda: over(DistributedSampler(Indices(), ranks, rank, seed=117)),
        "a DistributedSampler of a part": lambda: DataLoader(half, sampler=DistributedSampler(half, ranks, rank)),
        "stored for a log": lambda: over(Logging(rank, ranks)),
        "in unequal runs": lambda: DataLoader(Indices(), 1, sampler=Runs(rank, ranks)),
        "a pipeline": lambda: DataLoader(Pipeline()),
        "a list": lambda: DataLoader(half),
        "tensors": lambda: DataLoader(TensorDataset(torch.tensor(half))),
        "a part on purpose": lambda: DataLoader(Part(half)),
    }
    told = {}
    for name, make in makers.items():
        given = make()
        try:
            patched = patch_dataloader_to_ddp(given)
            is_same = patched.sampler is given.sampler and patched.dataset is given.dataset
            told[name] = ("as it is" if is_same else "patched", str(check_loaders_is_patched(patched)))
        except DDPPatchError as error:
            told[name] = (type(error).__name__, str(error))
    patched = patch_dataloader_to_ddp(DataLoader(half), order="seeded")
    told["a list, not looked at"] = (str(len(patched)), "")
    return told


def test_what_is_sharded_already_is_known_or_told() -> None:
    first, second = run_ranks(outcomes, 2)
    assert first == second
    for name in ("marked", "made for this world", "a pipeline", "a part on purpose", "of the same seed"):
        assert first[name] == ("as it is", "True"), (name, first[name])
    assert first["made for one process"] == ("patched", "True")
    assert first["a list, not looked at"] == ("25", "")
    raised = {name: message for name, (kind, message) in first.items() if kind == "RankMismatchError"}
    assert raised.keys() == {
        "by itself",
        "by indices",
        "made for a larger one",
        "made for rank 0 everywhere",
        "of another seed",
        "stored for a log",
        "in unequal runs",
        "a list",
        "a DistributedSampler of a part",
        "tensors",
    }
    for name, sampler in (("by itself", "Padded"), ("by indices", "SubsetRandomSampler")):
        remedy = (f"build {sampler} for one process", "is_ddp_aware = True")
        assert_tells(raised[name], ("rank 0 and rank 1", f"different orders from {sampler}"), remedy)
    larger = ("not for these 2 ranks", "rank 0 of 4 on rank 0", "rank 1 of 4 on rank 1")
    assert_tells(raised["made for a larger one"], larger, ("own rank", "process_group="))
    assert_tells(raised["made for rank 0 everywhere"], "rank 0 of 2 on ranks 0, 1", "own rank")
    seeds = "seed of its DistributedSampler: 117 on rank 0; 134 on rank 1"
    assert_tells(raised["of another seed"], seeds, "the same on every rank")
    stored = ("sharded already by a Logging", "are also rank 1's", "stores its rank, as for a log", "shards nothing")
    assert_tells(raised["stored for a log"], stored, "is_ddp_aware = False")
    runs = ("batches of its Runs (uneven='keep' lets them differ)", "11 on rank 1; 12 on rank 0")
    assert_tells(raised["in unequal runs"], runs, "the same on every rank")
    assert_tells(raised["a list"], ("rank 0 and rank 1", "the elements of a list"), "data[rank::world_size]")
    part = raised["a DistributedSampler of a part"]
    assert_tells(part, "the elements of a list", ("leave out a DistributedSampler", "is_ddp_aware = True"))
    assert_tells(raised["tensors"], ("rank 0 and rank 1", "a TensorDataset"), "is_ddp_aware = True")


class Turning(Made):
    """Every epoch has another order, which ``set_epoch`` chooses."""

    n, epoch = 48, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n // self.world_size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[self.rank :: self.world_size])


def looked_at(rank: int, ranks: int) -> list[list[int]]:
    """Rank 1, the slower one, looks at a batch within an epoch; all break off the second epoch."""
    train: Any = patch_dataloader_to_ddp(DataLoader(Indices(48), 4, sampler=Turning(rank, ranks)))
    taken: list[list[int]] = []
    for epoch in range(4):
        train.sampler.set_epoch(epoch)
        taken.append([])
        for step, batch in enumerate(train):
            taken[epoch] += batch.tolist()
            if rank == 1 and (epoch, step) in {(0, 2), (1, 0)}:
                next(iter(train))
            dist.barrier()
            time.sleep(rank / 20)
            if (epoch, step) == (1, 2):
                break
    return taken


def astray(rank: int, ranks: int) -> str:
    """Rank 1's sampler is in another epoch, once; rank 0 is an epoch ahead by then."""
    sampler = Turning(rank, ranks)
    sampler.n = 400  # so many that it is not by chance
    train: Any = patch_dataloader_to_ddp(DataLoader(Indices(sampler.n), 4, sampler=sampler))
    try:
        for epoch in range(3):
            train.sampler.set_epoch(7 if rank and epoch == 1 else epoch)
            for step, _ in enumerate(train):
                if (epoch, step) == ((1, 0) if rank else (2, 4)):
                    dist.barrier()
    except DDPPatchError as error:
        return str(error)
    return ""


class PartOfStream(IterableDataset[int]):
    """Reads one rank's part on purpose."""

    is_ddp_aware = True

    def __init__(self, data: range) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        return iter(self.data)


def in_parts(rank: int, shorter: int, leaves_after: int) -> tuple[str, list[str]]:
    """Each rank reads a part on purpose; rank 1 has a shorter one, or leaves it early."""
    part = range(24 * rank, 24 * rank + 24 - shorter * rank)
    train: Any = patch_dataloader_to_ddp(DataLoader(PartOfStream(part), 4))
    told = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                for step, _ in enumerate(train, 1):
                    if rank and step == leaves_after:
                        break
        except DDPPatchError as error:
            told = f"{type(error).__name__}: {error}"
        dist.barrier()
    return told, [type(one.message).__name__ for one in caught]


def unequal_parts(rank: int, ranks: int) -> tuple[str, list[str]]:
    return in_parts(rank, shorter=12, leaves_after=0)


def left_early(rank: int, ranks: int) -> tuple[str, list[str]]:
    return in_parts(rank, shorter=0, leaves_after=3)


class Underestimated(PartOfStream):
    def __len__(self) -> int:
        return len(self.data) - 1


def watched_with_a_low_estimate(rank: int, ranks: int) -> list[str]:
    part = Underestimated(range(8 * rank, 8 * rank + 8))
    train: Any = patch_dataloader_to_ddp(DataLoader(part, batch_size=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # an iterator takes over what was noted before it
            assert sum(1 for _ in train) == 8  # list() would ask for the length
        dist.barrier()
    return [str(one.message) for one in caught if "Length of IterableDataset" in str(one.message)]


def test_ranks_with_parts_of_their_own_make_alike_passes_or_are_told() -> None:
    looks, unequal, estimated, left, strayed = run_each(
        2, looked_at, unequal_parts, watched_with_a_low_estimate, left_early, astray
    )
    for first, second in zip(*looks, strict=True):  # a look is no pass, and its samples are not compared
        assert len({*first, *second}) == len(first + second) in {24, 48}
    assert not any(told for told, _ in unequal)
    assert "StreamLengthWarning" in {name for _, names in unequal for name in names}
    assert estimated == [[], []]  # only the watching asked for that length
    assert any("RankMismatchError" in told and "rank 1 left epoch 0 after 3" in told for told, _ in left)
    assert any("are also rank" in told for told in strayed)
