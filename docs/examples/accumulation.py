"""Make a step for every four batches, on the ranks that torchrun starts, and print the mean loss of all ranks."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp

ACCUMULATED = 4


def main() -> None:
    """Train for one epoch."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # so that all ranks make the same random data
    inputs = torch.randn(1024, 20)
    labels = (inputs.sum(dim=1) > 0).long()
    loader = patch_dataloader_to_ddp(DataLoader(TensorDataset(inputs, labels), batch_size=16, shuffle=True))
    model = DistributedDataParallel(nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_loss, steps = torch.zeros(()), 0

    for done, (x, y) in enumerate(loader, start=1):
        is_step = done % ACCUMULATED == 0 or done == len(loader)
        with nullcontext() if is_step else model.no_sync():  # ranks talk in the last backward only
            loss = cross_entropy(model(x), y) / ACCUMULATED
            loss.backward()
        mean_loss += loss.detach() * ACCUMULATED / len(loader)
        if is_step:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1

    dist.all_reduce(mean_loss)  # the sum over the ranks
    mean_loss /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"{len(loader)} batches on each rank, {steps} steps, mean loss {mean_loss:.2f}")
    dist.monitored_barrier()  # nobody ends while others still take part
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
