"""webdataset: shards, shuffled by shard and by sample, with a plain loader and with WebLoader."""

import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
import webdataset as wds
from report import NUMBERS, report
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp


def write(folder: Path) -> None:
    """Write shards: tar files with a number in each sample."""
    for place, numbers in enumerate(NUMBERS):
        with tarfile.open(folder / f"{place}.tar", "w") as tar:
            for number in numbers:
                member = tarfile.TarInfo(f"{number:04}.cls")
                member.size = len(text := str(number).encode())
                tar.addfile(member, io.BytesIO(text))


def numbers(batch: Any) -> list[int]:
    """Return the numbers in a batch."""
    return list(map(int, batch[0]))


dist.init_process_group("gloo")
folder = Path(sys.argv[1])
if dist.get_rank() == 0:
    write(folder)
dist.barrier()

shards = sorted(map(str, folder.glob("*.tar")))
dataset = (
    wds.WebDataset(shards, nodesplitter=None, shardshuffle=100, detshuffle=True, seed=0)
    .compose(wds.detshuffle(100, seed=0))
    .decode()
    .to_tuple("cls")
)
loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
report("DataLoader", patch_dataloader_to_ddp(loader, share="by_worker"), numbers)

# A WebLoader is a pipeline with a DataLoader in front: patch that one. Batches that the dataset made come as they are.
web = wds.WebLoader(dataset.batched(4), batch_size=None, num_workers=2, persistent_workers=True)
web.pipeline[0] = patch_dataloader_to_ddp(web.pipeline[0], share="by_worker")
report("WebLoader", web, numbers)

dist.destroy_process_group()
