"""Trains on the files that this node has: ``of_this_node.py KIND``."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_patch import patch_dataloader_to_ddp


class Lines(Dataset[int]):
    """The numbers in all files, which are read when they are needed."""

    def __init__(self, folder: Path) -> None:
        # As they lie in the folder: file systems differ.
        self.files = [*map(str, (folder / "order").read_text().split())]
        self.lines = [(folder / file, place) for file in self.files for place in range(5)]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> int:
        file, place = self.lines[index]
        return int(file.read_text().split()[place])


class Held(Dataset[int]):
    """The numbers in all files, which are read at once."""

    def __init__(self, folder: Path) -> None:
        lines = Lines(folder)
        self.numbers = torch.tensor([lines[index] for index in range(len(lines))])

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return int(self.numbers[index])


class Stream(IterableDataset[int]):
    """The same numbers, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.read = Lines(folder)

    def __iter__(self) -> Iterator[int]:
        return (self.read[index] for index in range(len(self.read)))


dist.init_process_group("gloo")
kinds: dict[str, Any] = {"lines": Lines, "held": Held, "stream": Stream}
loader: DataLoader[Any] = patch_dataloader_to_ddp(DataLoader(kinds[sys.argv[1]](Path("data")), 2))
for _ in range(2):
    for batch in loader:
        dist.all_reduce(batch.sum())
print(f"rank {os.environ['RANK']} has trained")
dist.destroy_process_group()
