"""Train a classifier; the sampler draws the rare class as often as the other."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
inputs = torch.randn(1101, 20)
labels = (inputs[:, 0] > 1.3).long()
train_data = TensorDataset(inputs[:1000], labels[:1000])
test_data = TensorDataset(inputs[1000:], labels[1000:])

sampler = WeightedRandomSampler((1 + 8 * labels[:1000]).tolist(), num_samples=1000)
train = DataLoader(train_data, batch_size=50, sampler=sampler)
test = DataLoader(test_data, batch_size=50)
model = nn.Linear(20, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    with torch.no_grad():
        parts = [model(x.to(device)).argmax(dim=1) == y.to(device) for x, y in test]
    correct = torch.cat(parts)
    print(f"epoch {epoch}: accuracy {correct.float().mean():.3f} on {len(correct)} samples")
