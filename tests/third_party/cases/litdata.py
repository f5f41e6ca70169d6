"""litdata's streams."""

from pathlib import Path
from typing import Any

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, N, World, files


def chunks() -> str:
    return str(files("litdata", write))


def write(folder: Path) -> None:
    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_size=2)
    for number in range(N):
        writer[number] = number
    writer.done()
    writer.merge()


def stream() -> StreamingDataset:
    return StreamingDataset(chunks(), shuffle=True)


def both() -> CombinedStreamingDataset:
    """Two streams, of which each gives all that it has."""
    return CombinedStreamingDataset([stream(), stream()], seed=1, iterate_over_all=True)


def streamed(world: World) -> Any:
    return StreamingDataLoader(stream(), batch_size=4)


def streamed_together(world: World) -> Any:
    return StreamingDataLoader(both(), batch_size=4)


def streamed_by_torch(world: World) -> Any:
    return DataLoader(stream(), batch_size=4)


def of_torch(loader: Any, options: dict[str, Any]) -> Any:
    """The refusal's remedy: torch's loader of the same dataset."""
    made = DataLoader(
        loader.dataset, batch_size=loader.batch_size, num_workers=loader.num_workers, collate_fn=loader.collate_fn
    )
    return patch_dataloader_to_ddp(made, **options)


TOLD = (
    "torch.utils.data.DataLoader(loader.dataset, batch_size=loader.batch_size, "
    "num_workers=loader.num_workers, collate_fn=loader.collate_fn)"
)
CASES = [
    Case("litdata", "`StreamingDataLoader`", streamed, Fate.AS_IT_IS, on_ranks=True, repeats=True),
    Case("litdata", "`StreamingDataset`", streamed_by_torch, Fate.AS_IT_IS, on_ranks=True, repeats=True),
    Case(
        "litdata",
        "`StreamingDataLoader` of `CombinedStreamingDataset`",
        streamed_together,
        Fate.AS_IT_IS,
        on_ranks=True,
        repeats=True,
    ),
    Case("litdata", "`StreamingDataLoader`, of one process", streamed, Fate.REFUSED, remedy=of_torch, told=TOLD),
    Case(
        "litdata",
        "`StreamingDataLoader` of `CombinedStreamingDataset`, of one process",
        streamed_together,
        Fate.REFUSED,
        remedy=of_torch,
        told=TOLD,
    ),
    Case("litdata", "`StreamingDataset`, of one process", streamed_by_torch),
]
