"""The audit's verdict on any partition of a dataset, against a count by hand."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from audit_setups import Untouchable
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from ddp_patch import audit

Loaded = Callable[[list[int], int, int], DataLoader[Any]]

# Each example starts all workers of all ranks.
FEW = settings(max_examples=15)

# Ways to give a rank its samples: (its samples, how many there are to share, batch size).
WAYS: dict[str, Loaded] = {
    "sampler": lambda own, n, size: DataLoader(Untouchable(n + 2), size, sampler=own),
    "Subset": lambda own, n, size: DataLoader(Subset(Untouchable(n + 2), own), size),
    "Subset of a Subset": lambda own, n, size: DataLoader(
        Subset(Subset(Untouchable(2 * n + 2), range(n, 2 * n + 2)), own), size
    ),
    "list": lambda own, n, size: DataLoader([f"{index}.jpg" for index in own], size),  # type: ignore[arg-type]  # a list
}


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Draw how many samples there are, and what each rank gets of them: right, or with faults."""
    n, world = draw(st.integers(1, 30)), draw(st.integers(2, 5))
    order = draw(st.permutations(range(n)))
    parts = [order[rank::world] for rank in range(world)]
    if draw(st.booleans()):
        most = max(map(len, parts))
        parts = [part + order[: most - len(part)] for part in parts]
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 6]))):
        part = parts[draw(st.integers(0, world - 1))]
        if draw(st.booleans()):
            part.append(draw(st.integers(0, n + 1)))  # again, or one that is not to be shared
        elif part:
            part.pop()
    return n, parts


def is_right(n: int, parts: list[list[int]], batch_size: int) -> bool:
    """Count by hand: complete, nothing foreign, no repeats beyond padding, and equal steps."""
    got = Counter(sample for part in parts for sample in part)
    repeats = sum(got.values()) - len(got)
    return (
        set(got) == {*range(n)} and repeats <= -n % len(parts) and len({-(-len(p) // batch_size) for p in parts}) == 1
    )


@given(shares(), st.integers(1, 8), st.sampled_from(sorted(WAYS)))
def test_exactly_right_shares_hold(made: tuple[int, list[list[int]]], batch_size: int, way: str) -> None:
    n, parts = made

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        return WAYS[way]([*range(n)] if world_size == 1 else parts[rank], n, batch_size)

    report = audit(make, len(parts), epochs=1)
    event(", ".join(problem.kind for problem in report.problems) or "holds")
    assert report.ok == is_right(n, parts, batch_size)
    (epoch,) = report.epochs
    got = Counter(sample for part in parts for sample in part)
    assert epoch.missing == len({*range(n)} - set(got))
    assert epoch.foreign == sum(times for sample, times in got.items() if sample >= n)
    assert epoch.repeated == sum(times - 1 for sample, times in got.items() if sample < n)


class OfShards(IterableDataset[int]):
    """What each worker reads, by its number: whole shards, one after the other."""

    def __init__(self, shards: list[list[int]], by_worker: list[list[int]]) -> None:
        self.shards, self.by_worker = shards, by_worker

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return (sample for shard in self.by_worker[info.id] for sample in self.shards[shard])


@st.composite
def shards(draw: st.DrawFn) -> list[list[int]]:
    """Draw shards of any lengths, one for each worker."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    return [[*range(sum(lengths[:shard]), sum(lengths[: shard + 1]))] for shard in range(len(lengths))]


@FEW
@given(shards(), st.integers(2, 3), st.integers(1, 4), st.data())
def test_what_workers_of_ranks_read_wrongly_is_counted(
    held: list[list[int]], world: int, batch_size: int, data: st.DataObject
) -> None:
    """Every worker of every rank reads some of the shards, whichever; one process reads them all."""
    workers, n = len(held), sum(map(len, held))
    readers = st.lists(st.lists(st.integers(0, workers - 1), max_size=2), min_size=workers, max_size=workers)
    read = [data.draw(readers) for _ in range(world)]

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        by_worker = [[worker] for worker in range(workers)] if world_size == 1 else read[rank]
        return DataLoader(OfShards(held, by_worker), batch_size, num_workers=workers)

    of_workers = [[[sample for shard in own for sample in held[shard]] for own in rank] for rank in read]
    got = Counter(sample for rank in of_workers for own in rank for sample in own)
    steps = {sum(-(-len(own) // batch_size) for own in rank) for rank in of_workers}
    report = audit(make, world, epochs=1)
    event(", ".join(problem.kind for problem in report.problems) or "holds")
    (epoch,) = report.epochs
    assert epoch.expected == n
    assert epoch.missing == n - len(got)
    assert epoch.repeated == got.total() - len(got)
    assert report.ok == (len(got) == n and got.total() - n <= -n % world and len(steps) == 1)
