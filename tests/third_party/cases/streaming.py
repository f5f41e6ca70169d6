"""MosaicML's streams."""

import tempfile
from pathlib import Path
from typing import Any

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from third_party.base import N, Case, Fate, World
from torch.utils.data import DataLoader


def shards() -> str:
    folder = Path(tempfile.gettempdir()) / f"third-party-mosaicml-{N}"
    if not (folder / "index.json").exists():
        with MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=200) as writer:
            for number in range(N):
                writer.write({"number": number})
    return str(folder)


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
