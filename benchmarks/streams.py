"""How fast a job reads an iterable dataset whose samples take time to read: this package beside others.

    python benchmarks/streams.py  # the recipes of docs/streams.md alone

Every case (implementation, world, cost) runs on real gloo ranks of its own, with a deadline. All read the same shards,
which split themselves over workers; reading an item sleeps for as long as it costs. The ranks begin together. Items
count from when every rank has its first batch until the last batch of all, each item once. ``nox -s bench`` puts the
table into ``docs/benchmarks.md``.
"""

import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise, starmap
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import RanksFailedError
from ddp_patch.testing import run_ranks

__all__ = ["table"]

BATCH = 4
ITEMS = {0: 2000, 1: 500, 10: 60, 40: 20}  # by what an item costs in ms: how many are there for each reader
REPEATS = 3  # of which the middle one counts
LIMIT_S = 60.0

Events = list[tuple[float, list[int]]]  # when a rank got a batch, and what was in it


@dataclass(frozen=True)
class World:
    """So many ranks with so many workers each; there is a shard for each worker of all ranks."""

    ranks: int
    workers: int
    unequal: bool = False

    @property
    def readers(self) -> int:
        """How many workers there are."""
        return self.ranks * self.workers

    def shards(self, cost_ms: int) -> list[range]:
        """Return the shards: of one length, or from half of it to one and a half."""
        steps = range(self.readers) if self.unequal else [(self.readers - 1) / 2] * self.readers
        lengths = [round(ITEMS[cost_ms] * (0.5 + step / (self.readers - 1))) for step in steps]
        return list(starmap(range, pairwise(accumulate(lengths, initial=0))))

    def __str__(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{self.ranks} ranks x {workers}{', unequal shards' if self.unequal else ''}"


WORLDS = (World(4, 2), World(4, 2, unequal=True))


# What is read, as each library has it.


def read(shards: Iterable[range], cost_ms: int) -> Iterator[int]:
    """Yield what is in the shards; each item costs."""
    for item in chain.from_iterable(shards):
        if cost_ms:
            time.sleep(cost_ms / 1000)
        yield item


class Shards(IterableDataset[int]):
    """A dataset of the user's, which splits its shards over workers."""

    def __init__(self, shards: Sequence[range], cost_ms: int) -> None:
        self.shards, self.cost_ms = shards, cost_ms

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from read(self.shards[info.id :: info.num_workers] if info else self.shards, self.cost_ms)


def read_rows(shards: list[range], cost_ms: int) -> Iterator[dict[str, int]]:
    """Yield rows, as a generator of Hugging Face's does."""
    for item in read(shards, cost_ms):
        yield {"number": item}


class Tars:
    """What opens webdataset's shards: these are named by the numbers in them."""

    def __init__(self, cost_ms: int) -> None:
        self.cost_ms = cost_ms

    def __call__(self, sources: Iterable[dict[str, str]]) -> Iterator[int]:
        """Yield what is in them."""
        names = (source["url"].split("-") for source in sources)
        yield from read((range(int(start), int(stop)) for start, stop in names), self.cost_ms)


# Implementations: how each gives this rank its batches.


def loader(dataset: Any, world: World) -> DataLoader[Any]:
    """Make the user's loader."""
    return DataLoader(dataset, BATCH, num_workers=world.workers)


def ours(sharding: Any) -> Callable[[World, int, int], Iterable[Any]]:
    """Patch it."""
    return lambda world, cost_ms, rank: patch_dataloader_to_ddp(
        loader(Shards(world.shards(cost_ms), cost_ms), world), share=sharding
    )


def accelerates(dispatch: bool) -> Callable[[World, int, int], Iterable[Any]]:
    """Have accelerate prepare it: rank 0 reads for all, or each rank reads all."""

    def prepared(world: World, cost_ms: int, rank: int) -> Iterable[Any]:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        return accelerator.prepare(loader(Shards(world.shards(cost_ms), cost_ms), world))  # type: ignore[no-any-return]

    return prepared


def by_hand(world: World, cost_ms: int, rank: int) -> Iterable[Any]:
    """Give each rank its files, as a script would that has no library for that."""
    return loader(Shards(world.shards(cost_ms)[rank :: world.ranks], cost_ms), world)


def hugging_faces(world: World, cost_ms: int, rank: int, *, patched: bool = False) -> Iterable[Any]:
    """Have Hugging Face split the shards by node, and its workers split what is left; or patch the loader instead."""
    from datasets import IterableDataset as Streamed
    from datasets.distributed import split_dataset_by_node

    streamed = Streamed.from_generator(read_rows, gen_kwargs={"shards": world.shards(cost_ms), "cost_ms": cost_ms})
    if patched:
        given = patch_dataloader_to_ddp(loader(streamed, world), share="by_worker")
    else:
        given = loader(split_dataset_by_node(streamed, rank=rank, world_size=world.ranks), world)
    return (batch["number"] for batch in given)


def webdatasets(world: World, cost_ms: int, rank: int, *, patched: bool = False) -> Iterable[Any]:
    """Have webdataset split the shards by node, then by worker; or patch the loader instead."""
    import webdataset as wds

    names = wds.SimpleShardList([f"{shard.start}-{shard.stop}" for shard in world.shards(cost_ms)])
    by_node = [] if patched else [wds.split_by_node]
    given = loader(wds.DataPipeline(names, *by_node, wds.split_by_worker, Tars(cost_ms)), world)
    return patch_dataloader_to_ddp(given, share="by_worker") if patched else given


IMPLEMENTATIONS: dict[str, Callable[[World, int, int], Iterable[Any]]] = {
    "ddp_patch, default": ours("auto"),
    'ddp_patch, "by_worker"': ours("by_worker"),
    "accelerate, dispatch_batches=True": accelerates(True),
    "accelerate, dispatch_batches=False": accelerates(False),
    "datasets, split_dataset_by_node": hugging_faces,
    "webdataset, split_by_node": webdatasets,
}
# By package: its own splitting, then the recipe of docs/streams.md.
RECIPES: dict[str, Callable[[World, int, int], Iterable[Any]]] = {
    "files: each rank is given its own": by_hand,
    "files: patched": ours("by_worker"),
    "webdataset: split_by_node": webdatasets,
    "webdataset: patched": partial(webdatasets, patched=True),
    "datasets: split_dataset_by_node": hugging_faces,
    "datasets: patched": partial(hugging_faces, patched=True),
}


# On a rank.


def events_on_rank(rank: int, world_size: int, name: str, world: World, cost_ms: int, folder: str) -> Events:
    """Take a whole epoch as fast as it comes."""
    batches = (IMPLEMENTATIONS | RECIPES)[name](world, cost_ms, rank)
    Path(folder, str(rank)).touch()
    while len(list(Path(folder).iterdir())) < world_size:  # no collective: workers are forked next
        time.sleep(0.001)
    return [(time.monotonic(), batch.tolist()) for batch in batches]


# In the parent.


@dataclass(frozen=True)
class Result:
    """What the ranks of one case got.

    Attributes:
        speed: Items a second.
        missing: How many items no rank got.
        repeated: How many items came once too often.
        steps: How many steps each rank made.
    """

    speed: float
    missing: int
    repeated: int
    steps: list[int]


def measure(name: str, world: World, cost_ms: int) -> Result | None:
    """Run one case; None where it fails or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, world, cost_ms, folder)
        try:
            ranks = run_ranks(events_on_rank, world.ranks, *arguments, timeout=LIMIT_S)
        except RanksFailedError as error:
            print(error)
            return None
    return judged(world.shards(cost_ms), ranks)


def middle(name: str, world: World, cost_ms: int) -> Result | None:
    """Run one case several times; return the result whose speed is the median, or None where one fails."""
    results = [measure(name, world, cost_ms) for _ in range(REPEATS)]
    found = sorted((result for result in results if result is not None), key=lambda result: result.speed)
    return found[len(found) // 2] if len(found) == REPEATS else None


def judged(shards: list[range], ranks: list[Events]) -> Result:
    """Count what came, and what of it came when all ranks were under way."""
    got = Counter(item for events in ranks for _, batch in events for item in batch)
    wanted = Counter(chain.from_iterable(shards))
    start = max(events[0][0] for events in ranks if events)
    end = max(events[-1][0] for events in ranks if events)
    first: dict[int, float] = {}
    for moment, batch in sorted(chain.from_iterable(ranks)):
        for item in batch:
            first.setdefault(item, moment)
    speed = sum(moment > start for moment in first.values()) / (end - start)
    steps = [len(events) for events in ranks]
    return Result(speed, (wanted - got).total(), (got - wanted).total(), steps)


def row(world: World, name: str, results: Sequence[Result | None]) -> list[str]:
    """Tell what came of one implementation in one world, at every cost: the most that was missing and repeated."""
    cells = [str(world), name]
    for cost_ms, result in zip(ITEMS, results, strict=True):
        if result is None:
            cells.append("fails")
        elif cost_ms:
            cells.append(f"{result.speed * cost_ms / 1000 / world.readers:.2f}")
        else:
            cells.append(f"{result.speed:,.0f}")
    found = [result for result in results if result is not None]
    if not found:
        return [*cells, "", ""]
    steps = found[-1].steps
    each = f"{min(steps)} to {max(steps)}" if len(set(steps)) > 1 else str(steps[0])
    lost_and_repeated = f"{max(result.missing for result in found)}, {max(result.repeated for result in found)}"
    return [*cells, lost_and_repeated, each]


def table(worlds: Sequence[World] = WORLDS, names: Iterable[str] = tuple(IMPLEMENTATIONS)) -> list[list[str]]:
    """Measure everything."""
    multiprocessing.set_forkserver_preload(["ddp_patch.testing", "accelerate", "datasets", "webdataset", __name__])
    costs = [f"{cost_ms} ms: of ideal" if cost_ms else "0 ms: items/s" for cost_ms in ITEMS]
    rows = [["ranks x workers", "", *costs, "missing, repeated", "steps"]]
    for world in worlds:
        for name in names:
            rows.append(row(world, name, [middle(name, world, cost_ms) for cost_ms in ITEMS]))
            print(*rows[-1], sep=" | ", flush=True)
    return rows


def recipes() -> list[list[str]]:
    """Measure what the recipes cost, beside each package's own way."""
    return [cells[1:] for cells in table([World(4, 2)], RECIPES)]


if __name__ == "__main__":
    import streams  # by the name that other processes know it by
    from pages import show

    show(streams.recipes(), "recipes")
