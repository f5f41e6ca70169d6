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


def streamed(world: World, kind: Any = DataLoader) -> Any:
    return kind(StreamingDataset(local=shards(), batch_size=4, shuffle=True), batch_size=4)


CASES = [
    Case("mosaicml-streaming", "`StreamingDataset`", streamed, Fate.AS_IT_IS, on_ranks=True, repeats=True),
    Case(
        "mosaicml-streaming",
        "`StreamingDataLoader`",
        lambda world: streamed(world, StreamingDataLoader),
        Fate.AS_IT_IS,
        on_ranks=True,
        repeats=True,
    ),
]
