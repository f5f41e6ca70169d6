"""torchtitan: save a position as its checkpoints do; with a checkpoint's folder as argument, go on from it."""

import sys
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader

from ddp_patch.integrations.torchtitan import PatchedDataLoader


class Tokens(PatchedDataLoader):
    """For a configuration: ``Trainer.Config(dataloader=Tokens.Config(), ...)``."""

    @dataclass(kw_only=True, slots=True)
    class Config(PatchedDataLoader.Config):
        """What a configuration says; torchtitan finds the class by it."""

    def make_loader(self, config: Any, *, tokenizer: Any, seq_len: int, local_batch_size: int) -> DataLoader[Any]:
        """Make it as for one process; here of 64 documents, each of one token again and again."""
        samples = [({"input": row}, row) for row in torch.arange(64)[:, None].expand(64, seq_len)]
        return DataLoader(samples, local_batch_size, shuffle=True)  # type: ignore[arg-type]  # a list is a dataset


# What the trainer does:
dist.init_process_group("gloo")
world = {"dp_world_size": dist.get_world_size(), "dp_rank": dist.get_rank()}  # of its mesh
loader = Tokens.Config().build(**world, tokenizer=None, seq_len=8, local_batch_size=4)
if len(sys.argv) > 1:
    load({"dataloader": loader}, checkpoint_id=sys.argv[1])
for inputs, labels in islice(loader, 3):
    assert inputs["input"].shape == labels.shape == (4, 8)
save({"dataloader": loader}, checkpoint_id="checkpoints/step-3")
dist.destroy_process_group()
