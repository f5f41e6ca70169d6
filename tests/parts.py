"""What each worker of a loader gives, unpatched and on every rank of a world."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import Plan

__all__ = ["Read", "assert_nothing_is_lost", "assert_parts_are_shared", "epoch", "loader_of", "ranks", "share"]


@dataclass(frozen=True)
class Read:
    """What one loader's workers gave in an epoch."""

    batches: list[tuple[int, Any]]  # the worker that made it, and the batch

    @property
    def parts(self) -> dict[int, list[Any]]:
        """Each worker's items."""
        parts: dict[int, list[Any]] = {}
        for worker, batch in self.batches:
            parts.setdefault(worker, []).extend(batch if isinstance(batch, list) else [batch])
        return parts

    @property
    def items(self) -> list[Any]:
        return [item for _, batch in self.batches for item in (batch if isinstance(batch, list) else [batch])]

    @property
    def steps(self) -> list[int]:
        """Which worker made the batch of each step."""
        return [worker for worker, _ in self.batches]


def told_by(batch: Any, item_of: Callable[[Any], Any] | None = None) -> Any:
    """Say of each batch which worker made it: a collate_fn always knows."""
    info = get_worker_info()
    if item_of is not None:
        batch = [item_of(row) for row in batch] if isinstance(batch, list) else item_of(batch)
    return info.id if info else 0, batch


def loader_of(
    dataset: Any,
    workers: int,
    kind: Callable[..., DataLoader[Any]] = DataLoader,
    item_of: Callable[[Any], Any] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    collate = partial(told_by, item_of=item_of)
    return kind(dataset, num_workers=workers, collate_fn=collate, **{"batch_size": 3} | options)


def epoch(loader: DataLoader[Any]) -> Read:
    return Read(list(loader))


def ranks(make: Callable[[], DataLoader[Any]], world_size: int, **options: Any) -> list[Read]:
    """An epoch of each rank's loader, made as that rank would: seeded like no other."""
    reads = []
    for rank in range(world_size):
        seed_ambient(100 + rank)
        options = {"seed": 5} | options
        reads.append(epoch(patch_dataloader_to_ddp(make(), rank=rank, num_replicas=world_size, **options)))
    return reads


def share(part: list[Any], rank: int, world_size: int, uneven: Uneven) -> list[Any]:
    return [part[position % len(part)] for position in Plan(rank, world_size, uneven).share(len(part))]


def cut(items: list[Any], batch_size: int | None, drop_last: bool) -> list[Any]:
    """The batches of a worker's items."""
    if batch_size is None:
        return items
    batches = [items[at : at + batch_size] for at in range(0, len(items), batch_size)]
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


def assert_parts_are_shared(
    make: Callable[[], Any],
    workers: int,
    world_size: int,
    uneven: Uneven,
    batch_size: int | None = 3,
    drop_last: bool = False,
    **options: Any,
) -> None:
    """Each rank has its share of what each of an unpatched loader's workers reads, in batches made by that worker."""
    alone = epoch(loader_of(make(), workers, batch_size=batch_size, **options)).parts
    batching: Any = {"batch_size": batch_size} | ({"drop_last": True} if drop_last else {})
    reads = ranks(lambda: loader_of(make(), workers, **batching, **options), world_size, uneven=uneven)
    for rank, read in enumerate(reads):
        for worker in range(max(1, workers)):
            expected = cut(share(alone.get(worker, []), rank, world_size, uneven), batch_size, drop_last)
            assert [batch for by, batch in read.batches if by == worker] == expected, (rank, worker)
    if uneven != "keep":
        assert len({tuple(read.steps) for read in reads}) == 1
    if not drop_last:
        assert_nothing_is_lost(alone, reads, uneven)


def assert_nothing_is_lost(alone: dict[int, list[Any]], reads: list[Read], uneven: Uneven) -> None:
    """But for less than a round of each part."""
    for worker, part in alone.items():
        together = Counter(item for read in reads for item in read.parts.get(worker, []))
        lost, repeated = Counter(part) - together, together - Counter(part)
        assert lost.total() == (len(part) % len(reads) if uneven == "drop" else 0)
        assert repeated.total() == (-len(part) % len(reads) if uneven == "pad" else 0)
        assert set(repeated) <= set(part)
