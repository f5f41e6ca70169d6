"""Hugging Face: streamed datasets with more and fewer shards than readers, their epochs, and a resume."""

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import datasets
import torch.distributed as dist
from report import NUMBERS, report
from torch.utils.data import DataLoader

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader


def rows(shards: list[range]) -> Iterator[dict[str, int]]:
    """Yield the rows of some shards; ``load_dataset(..., streaming=True)`` gives such a dataset of files."""
    for shard in shards:
        for number in shard:
            yield {"number": number}


def numbers(batch: Any) -> list[int]:
    """Return the numbers in a batch."""
    found: list[int] = batch["number"].tolist()
    return found


dist.init_process_group("gloo")

# 8 shards, and 2 ranks with 2 workers each read them: each shard once in the job.
streamed = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": NUMBERS}).shuffle(seed=0, buffer_size=20)
once = patch_dataloader_to_ddp(DataLoader(streamed, 4, num_workers=2), share="by_worker")
report("8 shards", once, numbers)

# 2 shards are fewer than the 4 readers: each rank reads both, and keeps its shard of the rows.
few = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [range(48), range(48, 96)]})
loader = patch_dataloader_to_ddp(DataLoader(few, 4, num_workers=2))
report("2 shards", loader, numbers)

# Stop within an epoch, and go on; another number of ranks may do so, too.
taken = [numbers(batch) for _, batch in zip(range(5), loader, strict=False)]
state = loader_state(loader)
again = patch_dataloader_to_ddp(DataLoader(few, 4, num_workers=2))
restore_loader(again, state)
rest = [numbers(batch) for batch in again]
halves: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(halves, [taken, rest])
if dist.get_rank() == 0:
    print("resumed:", *(f"{len(first)}+{len(then)} steps" for first, then in halves), end=", ")
    print(len({number for half in halves for part in half for batch in part for number in batch}), "seen")
dist.monitored_barrier()

dist.destroy_process_group()
