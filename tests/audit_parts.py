"""Set-ups in which each rank has data of its own, right and broken, for the audit to look at: each a factory."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from audit_setups import Untouchable
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, IterableDataset, Subset, random_split

N, WORLD = 104, 4
NAMES = [f"{number}.jpg" for number in range(N)]
BASE = Untouchable(N)
# Four parts that somebody made once, for all ranks.
PARTS: list[Any] = random_split(BASE, [N // WORLD] * WORLD, torch.Generator().manual_seed(0))

Make: TypeAlias = Callable[[int, int], DataLoader[Any]]


def of(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, **options)


def sliced(data: Any) -> Make:
    return lambda rank, world_size: of(data[rank::world_size])


def pieces(data: Any, cuts: Sequence[int]) -> Make:
    """Cut data at fixed places, one piece for each rank."""
    return lambda rank, world_size: of(data if world_size == 1 else data[cuts[rank] : cuts[rank + 1]])


class Every(IterableDataset[int]):
    """The every-so-many-th number of a stream."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def __iter__(self) -> Iterator[int]:
        return islice(iter(range(N)), self.rank, None, self.step)


def subset_that_fills_up(rank: int, world_size: int) -> DataLoader[Any]:
    own = [*range(rank, 103, world_size)]
    return of(Subset(Untouchable(103), own + [0] * (-(-103 // world_size) - len(own))))


def concatenated(rank: int, world_size: int) -> DataLoader[Any]:
    data: Any = NAMES
    return of(ConcatDataset([Subset(data, range(rank, 60, world_size)), data[60 + rank :: world_size]]))


RIGHT: dict[str, Make] = {
    "Subset of torch's indices": lambda rank, world_size: of(
        Subset(Untouchable(N), torch.arange(rank, N, world_size))  # type: ignore[arg-type]  # torch takes it
    ),
    "Subset that fills up its last round": subset_that_fills_up,
    "list": sliced(NAMES),
    "list in pieces": pieces(NAMES, [0, 26, 52, 78, 104]),
    "lists and Subsets, concatenated": concatenated,
    "stream": lambda rank, world_size: of(Every(rank, world_size)),
}


def random_split_of_each_rank(rank: int, world_size: int) -> DataLoader[Any]:
    return of(random_split(BASE, [N // world_size] * world_size)[rank])


def shared_twice(rank: int, world_size: int) -> DataLoader[Any]:
    part: Any = NAMES[rank::world_size]
    return of(part, sampler=DistributedSampler(part, world_size, rank, shuffle=False))


def by_process_group(rank: int, world_size: int) -> DataLoader[Any]:
    """Asks the process group, and takes itself for alone where there is none."""
    in_group = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if in_group else (0, 1)
    return of(NAMES[rank::world_size])


def validation_too(rank: int, world_size: int) -> DataLoader[Any]:
    return of(Untouchable(112), sampler=range(rank, N if world_size == 1 else 112, world_size))


def other_names(rank: int, world_size: int) -> DataLoader[Any]:
    names = NAMES if world_size == 1 else [f"val/{name}" for name in NAMES]
    return of(names[rank::world_size])


# Set-up, the kind of its problem, what is said, and a word of the remedy.
# Of parts that were made once, make(0, 1) returns no whole to compare the ranks with.
MADE_ONCE = ("foreign", ("78 samples that one process never gets",), "make(0, 1)")
WRONG: dict[str, tuple[Make, str, tuple[str, ...], str]] = {
    "lost data": (pieces(NAMES, [0, 20, 40, 60, 80]), "missing", ("24 of 104 samples",), "patch_dataloader_to_ddp()"),
    "overlapping slices": (
        lambda rank, world_size: of(NAMES if world_size == 1 else (NAMES * 2)[26 * rank :][:40]),
        "repeated",
        ("56 of 104 samples", "on ranks 2, 3"),
        "disjoint",
    ),
    "a process group that is not there": (by_process_group, "not_sharded", ("all of the data",), "its arguments"),
    "random_split of each rank": (random_split_of_each_rank, "ranks_disagree", ("seeded alike",), "seed every rank"),
    "slices that are shared again": (shared_twice, "double_sharding", ("76 of 104 samples",), "Shard once"),
    "parts made once": (lambda rank, world_size: of(PARTS[rank]), *MADE_ONCE),
    "streams made once": (lambda rank, world_size: of(Every(rank, WORLD)), *MADE_ONCE),
    "samples of another split": (validation_too, "foreign", ("8 samples", "104 on rank 0", "one process"), "same data"),
    "other data": (
        other_names,
        "foreign",
        ("104 of 104 samples are missing", "104 samples", "'val/103.jpg' on rank 3"),
        "same data",
    ),
}
