"""Train a classifier; the sampler draws the rare class as often as the other."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from ddp_patch import gather_in_order, patch_dataloader_to_ddp

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # this rank's GPU, which "cuda" means from now on
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

torch.manual_seed(0)
inputs = torch.randn(1101, 20)
labels = (inputs[:, 0] > 1.3).long()
train_data = TensorDataset(inputs[:1000], labels[:1000])
test_data = TensorDataset(inputs[1000:], labels[1000:])

sampler = WeightedRandomSampler((1 + 8 * labels[:1000]).tolist(), num_samples=1000)
train = DataLoader(train_data, batch_size=50, sampler=sampler)
test = DataLoader(test_data, batch_size=50)
train, test = patch_dataloader_to_ddp((train, test))
model = DistributedDataParallel(nn.Linear(20, 2).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())

for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    with torch.no_grad():
        parts = [model(x.to(device)).argmax(dim=1) == y.to(device) for x, y in test]
    correct = gather_in_order(torch.cat(parts), test)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: accuracy {correct.float().mean():.3f} on {len(correct)} samples")
dist.destroy_process_group()
