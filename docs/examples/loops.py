"""What training loops do beside plain steps, on all ranks and in one process, and how far the parameters differ.

Start it with ``torchrun --standalone --nproc-per-node 3 docs/examples/loops.py``.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import iter_with_weights, patch_dataloader_to_ddp

# Three ranks divide neither the batches nor the last one, of 7 samples.
SAMPLES, BATCH_SIZE, EPOCHS, ACCUMULATED, LONGEST = 103, 16, 3, 4, 6
EXACT, TOO_LARGE = 1e-10, 2.0**20

Loader = DataLoader[Any]
Model = DistributedDataParallel
Optimizer = torch.optim.Optimizer


def make_loader() -> Loader:
    """Return vectors with their classes."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, dtype=torch.float64, generator=drawn)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), BATCH_SIZE, shuffle=True)


def make_sequences() -> Loader:
    """Return sequences of 1 to 6 vectors, filled up to 6, with the classes of all vectors and with their lengths."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, LONGEST, 8, dtype=torch.float64, generator=drawn)
    lengths = torch.randint(1, LONGEST + 1, (SAMPLES,), generator=drawn)
    return DataLoader(TensorDataset(x, x[:, :, :4].argmax(dim=2), lengths), BATCH_SIZE, shuffle=True)


# What trains an epoch.


def plain(model: Model, loader: Loader, optimizer: Optimizer) -> None:
    """Take a step for each batch."""
    for (x, y), weights in iter_with_weights(loader, dtype=torch.float64):
        optimizer.zero_grad()
        losses = cross_entropy(model(x), y, reduction="none")
        (losses * weights).sum().backward()
        optimizer.step()


def scheduled(model: Model, loader: Loader, optimizer: Optimizer) -> None:
    """Warm up, then decay."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=len(loader))
    for (x, y), weights in iter_with_weights(loader, dtype=torch.float64):
        optimizer.zero_grad()
        losses = cross_entropy(model(x), y, reduction="none")
        (losses * weights).sum().backward()
        optimizer.step()
        scheduler.step()


def accumulated(model: Model, loader: Loader, optimizer: Optimizer) -> None:
    """Take a step for several batches, and clip it."""
    batches = iter_with_weights(loader, dtype=torch.float64)
    while group := list(islice(batches, ACCUMULATED)):
        for place, ((x, y), weights) in enumerate(group, start=1):
            with nullcontext() if place == len(group) else model.no_sync():  # ranks send each other the sum alone
                losses = cross_entropy(model(x), y, reduction="none")
                ((losses * weights).sum() / len(group)).backward()
        clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()


def clipped(model: Model, loader: Loader, optimizer: Optimizer) -> None:
    """Clip the gradient, which after ``backward`` is that of all ranks."""
    for (x, y), weights in iter_with_weights(loader, dtype=torch.float64):
        optimizer.zero_grad()
        losses = cross_entropy(model(x), y, reduction="none")
        (losses * weights).sum().backward()
        clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()


def lengths_of(batch: list[Tensor]) -> Tensor:
    """Return how many tokens each sample of a batch has."""
    return batch[2]


def per_token(model: Model, loader: Loader, optimizer: Optimizer) -> None:
    """Have all tokens of a step count alike."""
    for (x, y, lengths), weights in iter_with_weights(loader, dtype=torch.float64, weight_of=lengths_of):
        optimizer.zero_grad()
        losses = cross_entropy(model(x).transpose(1, 2), y, reduction="none")  # a loss for each token
        is_token = torch.arange(LONGEST) < lengths[:, None]
        ((losses * is_token).sum(dim=1) * weights).sum().backward()  # a sample's is the sum, not the mean
        optimizer.step()


def in_bfloat16(model: Model, loader: Loader, optimizer: Optimizer) -> None:
    """Compute in bfloat16; weights, and losses with them, are float32."""
    for (x, y), weights in iter_with_weights(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = cross_entropy(model(x.float()), y, reduction="none")
        (losses.float() * weights).sum().backward()
        optimizer.step()


def scaled(model: Model, loader: Loader, optimizer: Optimizer, first_scale: float) -> None:
    """Compute in float16; steps with a scale that is too large are left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
    for (x, y), weights in iter_with_weights(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            losses = cross_entropy(model(x.float()), y, reduction="none")
        scaler.scale((losses.float() * weights).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    scales: list[Any] = [None] * dist.get_world_size(model.process_group)
    dist.all_gather_object(scales, scaler.get_scale(), group=model.process_group)
    assert len(set(scales)) == 1  # all ranks have left out the same steps
    assert (scales[0] < first_scale) == (first_scale == TOO_LARGE)


# What trains a model, and compares.


class AllReduced(torch.autograd.Function):
    """The sum over all ranks, and of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sum."""
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Sum what each rank's loss has to do with it."""
        return AllReduced.forward(ctx, gradient)


class SyncedBatchNorm(nn.BatchNorm1d):
    """What torch's SyncBatchNorm computes, on CPUs too: statistics of all ranks' samples, padding included."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, in training."""
        sums = torch.stack([x.sum(dim=0), x.square().sum(dim=0), torch.full_like(x[0], len(x))])
        total, squares, count = AllReduced.apply(sums)
        mean = total / count
        scale = (squares / count - mean.square() + self.eps).rsqrt()
        normalized: Tensor = (x - mean) * scale
        return normalized * self.weight + self.bias


@dataclass(frozen=True)
class Recipe:
    """A training.

    Attributes:
        epoch: Trains an epoch.
        loader: Makes the loader.
        norm: A layer in the midst of the network.
        dtype: That of the parameters.
        options: For the patch, beside ``share``.
    """

    epoch: Callable[[Model, Loader, Optimizer], None]
    loader: Callable[[], Loader] = make_loader
    norm: Callable[[int], nn.Module] = nn.Identity
    dtype: torch.dtype = torch.float64
    options: Mapping[str, Any] = field(default_factory=dict)

    def train(self, ranks: dist.ProcessGroup | None, **options: Any) -> Tensor:
        """Train on some ranks, and return all parameters."""
        torch.manual_seed(dist.get_rank())
        network = nn.Sequential(nn.Linear(8, 16), self.norm(16), nn.Tanh(), nn.Linear(16, 4)).to(self.dtype)
        model = DistributedDataParallel(network, process_group=ranks)  # sends all the parameters of the first
        loader = patch_dataloader_to_ddp(self.loader(), process_group=ranks, seed=0, **options)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        for _ in range(EPOCHS):
            self.epoch(model, loader, optimizer)
        return parameters_to_vector(network.parameters()).detach()


def per_sample(features: int) -> nn.Module:
    """Return norms that look at one sample at a time."""
    return nn.Sequential(nn.LayerNorm(features), nn.GroupNorm(4, features))


def dropout(features: int) -> nn.Module:
    """Return what draws at random."""
    return nn.Dropout(0.1)


single = partial(Recipe, dtype=torch.float32)
synced = partial(Recipe, plain, norm=SyncedBatchNorm)
RECIPES = {
    "learning rate, schedule": Recipe(scheduled),
    "accumulation, clipping": Recipe(accumulated),
    "clipping": Recipe(clipped),
    "losses per token": Recipe(per_token, make_sequences),
    "LayerNorm, GroupNorm": Recipe(plain, norm=per_sample),
    "BatchNorm of each rank": Recipe(plain, norm=nn.BatchNorm1d),
    "synced BatchNorm, padded": synced(),
    "synced BatchNorm, 'keep'": synced(options={"uneven": "keep"}),
    "bfloat16": single(in_bfloat16),
    "float16, GradScaler": single(partial(scaled, first_scale=2.0**10)),
    "float16, too large a scale": single(partial(scaled, first_scale=TOO_LARGE)),
    "Dropout": Recipe(plain, norm=dropout),
}


def main() -> None:
    """Train by each recipe, on all ranks and then on the first alone."""
    alone = dist.new_group([0])
    for name, recipe in RECIPES.items():
        together = recipe.train(None, share="within_batches", **recipe.options)
        if dist.get_rank() == 0:
            norm = nn.BatchNorm1d if recipe.norm is SyncedBatchNorm else recipe.norm
            one = Recipe(recipe.epoch, recipe.loader, norm, recipe.dtype).train(alone)
            difference = (together - one).abs().max().item()
            print(f"{name:<28}", "below 1e-10" if difference < EXACT else f"{difference:.0e}")
    # Nobody may end right after a collective: gloo's threads abort if they free its tensors while Python shuts down.
    dist.monitored_barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
