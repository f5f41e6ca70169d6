"""Train a classifier, and evaluate it after each epoch."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train for three epochs."""
    torch.manual_seed(0)
    inputs, model = torch.randn(1125, 20), nn.Linear(20, 2)
    labels = (inputs @ torch.randn(20) > 0).long()
    train_data = TensorDataset(inputs[:1024], labels[:1024])
    test_data = TensorDataset(inputs[1024:], labels[1024:])

    order = torch.Generator().manual_seed(1)
    train = DataLoader(train_data, batch_size=64, shuffle=True, generator=order)
    test = DataLoader(test_data, batch_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(3):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            parts = [cross_entropy(model(x), y, reduction="none") for x, y in test]
        losses = torch.cat(parts)
        print(f"epoch {epoch}: {len(losses)} samples, mean loss {losses.mean():.4f}")


if __name__ == "__main__":
    main()
