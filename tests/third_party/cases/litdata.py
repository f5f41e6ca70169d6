"""litdata's streams."""

from pathlib import Path
from typing import Any

from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter
from torch.utils.data import DataLoader

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


def streamed(world: World) -> Any:
    return StreamingDataLoader(StreamingDataset(chunks(), shuffle=True), batch_size=4)


def streamed_by_torch(world: World) -> Any:
    return DataLoader(StreamingDataset(chunks(), shuffle=True), batch_size=4)


CASES = [
    Case("litdata", "`StreamingDataLoader`", streamed, Fate.AS_IT_IS, on_ranks=True, repeats=True),
    Case("litdata", "`StreamingDataset`", streamed_by_torch, Fate.AS_IT_IS, on_ranks=True, repeats=True),
]
