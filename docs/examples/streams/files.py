"""A dataset of files, which its workers share among themselves."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
from report import NUMBERS, report
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_patch import patch_dataloader_to_ddp


class Lines(IterableDataset[int]):
    """The lines of some files; worker j of k reads the files j, j + k, j + 2k, ..."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for file in self.files[info.id :: info.num_workers] if info else self.files:
            yield from map(int, file.read_text().split())


dist.init_process_group("gloo")
folder = Path(sys.argv[1])
if dist.get_rank() == 0:
    for place, numbers in enumerate(NUMBERS):
        (folder / f"{place}.txt").write_text("\n".join(map(str, numbers)))
dist.barrier()

dataset = Lines(sorted(folder.glob("*.txt")))
loader = DataLoader(dataset, batch_size=4, num_workers=2)
once = patch_dataloader_to_ddp(loader, share="by_worker")  # the job reads each file once
report("by_worker", once, lambda batch: batch.tolist())

whole = patch_dataloader_to_ddp(loader)  # each rank reads each file, and keeps its shard of the lines
report("default", whole, lambda batch: batch.tolist())

dist.destroy_process_group()
