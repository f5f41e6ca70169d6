"""Reads files, which a stream's workers divide: ``by_worker.py FOLDER``; each rank writes down what it is given."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_patch import patch_dataloader_to_ddp


class Files(IterableDataset[int]):
    """The numbers in files, of which each worker reads its part."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(map(str, folder.glob("part-*")))

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for file in self.files[info.id :: info.num_workers] if info else self.files:
            yield from map(int, Path(file).read_text().split())


dist.init_process_group("gloo")
folder = Path(sys.argv[1])
loader = patch_dataloader_to_ddp(DataLoader(Files(folder), 4, num_workers=2), share="by_worker")
with (folder / f"given-{os.environ['RANK']}").open("w") as file:
    for epoch in range(2):
        for batch in loader:
            file.write("".join(f"{epoch} {number}\n" for number in batch.tolist()))
            dist.all_reduce(batch.sum())
dist.destroy_process_group()
