"""Train a classifier; the sampler draws the rare class as often as the other."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(0)
labels = (torch.arange(1000) % 10 == 0).long()
inputs = torch.randn(1000, 20) + labels[:, None]
sampler = WeightedRandomSampler((1 + 8 * labels).tolist(), num_samples=1000)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=50, sampler=sampler)
model = nn.Linear(20, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
