"""PyTorch Geometric: shard batches of graphs over the ranks that torchrun starts."""

import torch
import torch.distributed as dist
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from ddp_patch import patch_dataloader_to_ddp

dist.init_process_group("gloo")
graphs = [Data(x=torch.ones(nodes, 1)) for nodes in range(1, 65)]
loader = patch_dataloader_to_ddp(DataLoader(graphs, batch_size=4, shuffle=True))
for batch in loader:
    assert batch.num_graphs == 4
dist.destroy_process_group()
