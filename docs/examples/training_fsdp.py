"""Train a classifier, sharded by FSDP2: the same one, whatever number of ranks ``torchrun`` starts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import iter_with_weights, patch_dataloader_to_ddp


def main() -> None:
    """Train for three epochs."""
    torch.manual_seed(0)
    inputs, model = torch.randn(1000, 20), nn.Linear(20, 2)
    labels = (inputs @ torch.randn(20) > 0).long()
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=64, shuffle=True)  # as for one process

    dist.init_process_group("gloo")
    loader = patch_dataloader_to_ddp(loader, share="within_batches")  # each rank gets a part of each batch
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # as for one process

    for epoch in range(3):
        for (x, y), weights in iter_with_weights(loader):  # a weight for each sample
            optimizer.zero_grad()
            losses = cross_entropy(model(x), y, reduction="none")  # a loss for each sample
            (losses * weights).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            optimizer.step()
        loss = cross_entropy(model(inputs), labels)  # on every rank: each has a part of the model
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.6f}")
    dist.monitored_barrier()  # nobody ends while others still take part
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
