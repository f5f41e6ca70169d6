"""A sampler that learns: the samples with the largest losses come first, on all ranks as in one process.

Start it with ``torchrun --standalone --nproc-per-node 2 docs/examples/hard_examples.py``.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ddp_patch import gather_step, patch_dataloader_to_ddp

N, BATCH = 96, 12


class HardestFirst(Sampler[int]):
    """Yields the samples by their latest losses."""

    def __init__(self) -> None:
        self.losses = torch.zeros(N, dtype=torch.float64)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        yield from self.losses.argsort(descending=True, stable=True).tolist()


def train(ranks: int) -> tuple[list[list[int]], Tensor]:
    """Train three epochs, in this process alone or on all ranks; return their orders and the last losses."""
    torch.manual_seed(0)
    x = torch.randn(N, 5, dtype=torch.float64)
    data = TensorDataset(torch.arange(N), x, x.sin().sum(1, keepdim=True))  # each row has its index
    sampler, model = HardestFirst(), nn.Linear(5, 1, dtype=torch.float64)
    loader = DataLoader(data, batch_size=BATCH // ranks, sampler=sampler)
    trained: nn.Module = model
    if ranks > 1:
        loader, trained = patch_dataloader_to_ddp(loader), DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    orders: list[list[int]] = []
    for _ in range(3):
        orders.append([])
        for indices, inputs, targets in loader:
            losses = mse_loss(trained(inputs), targets, reduction="none").squeeze(1)
            optimizer.zero_grad()
            losses.mean().backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            optimizer.step()
            learnt = indices, losses.detach()
            if ranks > 1:
                learnt = gather_step(learnt, loader)  # those of all ranks, on every rank
            sampler.losses[learnt[0]] = learnt[1]
            orders[-1] += learnt[0].tolist()
    return orders, sampler.losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    orders, losses = train(dist.get_world_size())
    expected, alone = train(1)
    assert orders == expected
    assert torch.allclose(losses, alone)
    if dist.get_rank() == 0:
        print(f"{len(orders)} epochs, each in the order of one process")
    dist.monitored_barrier()
    dist.destroy_process_group()
