"""MosaicML's streams."""

from pathlib import Path
from typing import Any

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from torch.utils.data import DataLoader

from third_party.base import Case, Fate, N, World, files


def shards() -> str:
    return str(files("streaming", write))


def write(folder: Path) -> None:
    with MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=200) as writer:
        for number in range(N):
            writer.write({"number": number})


def streamed(world: World, kind: Any) -> Any:
    return kind(StreamingDataset(local=shards(), batch_size=4, shuffle=True), batch_size=4)


CASES = [
    Case(
        "mosaicml-streaming",
        name,
        lambda world, kind=kind: streamed(world, kind),  # type: ignore[misc]  # a default binds it
        Fate.AS_IT_IS,
        on_ranks=True,
        repeats=True,
    )
    for name, kind in {"`StreamingDataset`": DataLoader, "`StreamingDataLoader`": StreamingDataLoader}.items()
]
