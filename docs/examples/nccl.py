"""Train a classifier on GPUs, and evaluate it after each epoch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import assert_loaders_patched, gather_in_order, patch_dataloader_to_ddp


def main() -> None:
    """Train for three epochs."""
    torch.manual_seed(0)
    inputs, model = torch.randn(1125, 20), nn.Linear(20, 2)
    labels = (inputs @ torch.randn(20) > 0).long()
    train_data = TensorDataset(inputs[:1024], labels[:1024])
    test_data = TensorDataset(inputs[1024:], labels[1024:])

    order = torch.Generator().manual_seed(1)
    train = DataLoader(train_data, batch_size=32, shuffle=True, generator=order, num_workers=1, pin_memory=True)
    test = DataLoader(test_data, batch_size=64, pin_memory=True)
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    train, test = patch_dataloader_to_ddp((train, test), device="auto")
    assert_loaders_patched([train, test])
    model.cuda()
    parallel = DistributedDataParallel(model, device_ids=[local_rank])  # averages the gradients of all ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(3):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(parallel(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            parts = [cross_entropy(model(x), y, reduction="none") for x, y in test]
        losses = gather_in_order(torch.cat(parts), test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(losses)} samples, mean loss {losses.mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
