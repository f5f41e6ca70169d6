"""Hugging Face datasets: shard a map-style and a streamed one over the ranks that torchrun starts."""

import torch.distributed as dist
from datasets import Dataset
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
rows = Dataset.from_dict({"number": list(range(64))}).with_format("torch")
stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=0, buffer_size=16)
loaders = DataLoader(rows, batch_size=4, shuffle=True), DataLoader(stream, batch_size=4)
for loader in patch_dataloader_to_ddp(loaders):
    numbers = {int(number) for batch in loader for number in batch["number"]}
    assert len(numbers) == 64 // dist.get_world_size()
dist.destroy_process_group()
