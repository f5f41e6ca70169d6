"""What dealing by ``cost=`` gains in a real training of two gloo ranks, beside what the costs promise.

    python benchmarks/balance_training.py

The texts are docstrings of Python's standard library, byte by byte. Two models learn to say the next byte: convolutions
over texts that are packed one after the other (a step takes as long as its batch has bytes), and a GRU over texts that
are padded to the longest. Epochs of today's loader and of the balanced one alternate in one run; both have the same
samples. CPU time tells what the clock would on a machine that has nothing else to do: the sum over steps of the
slowest rank's. ``nox -s bench`` runs this; it prints a table.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from balance_peers import PEERS
from pages import show
from texts import docstrings
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from ddp_patch import Cost, patch_dataloader_to_ddp
from ddp_patch.costs import CostOf
from ddp_patch.testing import run_ranks

RANKS, BATCH, LONGEST, SHORTEST = 2, 8, 1024, 2


class Epoch(NamedTuple):
    """What an epoch was on a rank.

    Attributes:
        seconds: How long it took.
        busy: The CPU time of each step.
        sizes: How many bytes each batch had, padding included.
        real: How many bytes all batches had without it.
    """

    seconds: float
    busy: list[float]
    sizes: list[int]
    real: int


class Convolutions(nn.Module):
    """Says the next byte from those before it, by convolutions."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.convolve = nn.ModuleList(nn.Conv1d(width, width, 5) for _ in range(4))
        self.say = nn.Linear(width, 256)

    def forward(self, texts: Tensor) -> Tensor:
        """Return a score for each next byte; texts and scores by batch and place."""
        values = self.embed(texts).mT
        for convolve in self.convolve:
            values = values + torch.relu(convolve(nn.functional.pad(values, (4, 0))))
        scores: Tensor = self.say(values.mT)
        return scores


class Recurrent(nn.Module):
    """Says the next byte from those before it, by a GRU."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed, self.say = nn.Embedding(256, width), nn.Linear(width, 256)
        self.recur = nn.GRU(width, width, batch_first=True)

    def forward(self, texts: Tensor) -> Tensor:
        """Return a score for each next byte; texts and scores by batch and place."""
        scores: Tensor = self.say(self.recur(self.embed(texts))[0])
        return scores


def packed(texts: list[Tensor]) -> Tensor:
    """Make a batch of texts, one after the other."""
    return torch.cat(texts)[None]


def padded(texts: list[Tensor]) -> Tensor:
    """Make a batch of texts, each as long as the longest."""
    return pad_sequence(texts, batch_first=True)


@dataclass(frozen=True)
class Kind:
    """A training.

    Attributes:
        name: For the table.
        model: What is trained.
        collate: Makes batches.
        cost_of: What a batch costs.
        share: What a rank takes at a time.
    """

    name: str
    model: type[nn.Module]
    collate: Any
    cost_of: CostOf
    share: Any = "samples"

    def loaders(self, texts: list[Tensor]) -> tuple[Any, Any]:
        """Return a rank's loaders, today's and the balanced one."""
        lengths = [len(text) for text in texts]

        def made(**options: Any) -> Any:
            loader: DataLoader[Any] = DataLoader(texts, BATCH, shuffle=True, collate_fn=self.collate, drop_last=True)  # type: ignore[arg-type]
            return patch_dataloader_to_ddp(loader, seed=1, share=self.share, **options)

        return made(), made(cost=Cost(lengths, of=self.cost_of))


KINDS = [
    Kind("convolutions over packed texts, samples", Convolutions, packed, "sum"),
    Kind("convolutions over packed texts, whole batches", Convolutions, packed, "sum", "batches"),
    Kind("GRU over padded texts, whole batches", Recurrent, padded, "padded", "batches"),
    Kind("GRU over padded texts, samples", Recurrent, padded, "padded"),
]


def on_rank(rank: int, world_size: int, number: int, texts: list[str], epochs: int) -> list[list[Epoch]]:
    """Train; return the epochs of each loader."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = KINDS[number]
    model = DistributedDataParallel(kind.model())
    return in_turn(model, kind.loaders(encoded(texts)), epochs)


def beside_peers(rank: int, world_size: int, texts: list[str], epochs: int) -> list[list[Epoch]]:
    """Train with each of the loaders that are compared; return the epochs of each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = encoded(texts)
    lengths = np.array([len(text) for text in data])
    loaders = [peer.loader(data, lengths, BATCH, rank, world_size, padded) for peer in PEERS]
    return in_turn(DistributedDataParallel(Convolutions()), loaders, epochs)


def encoded(texts: list[str]) -> list[Tensor]:
    """Return the bytes of texts."""
    return [torch.tensor(list(text.encode()[:LONGEST])) for text in texts]


def in_turn(model: nn.Module, loaders: Sequence[Any], epochs: int) -> list[list[Epoch]]:
    """Train with each loader in turn; return the epochs of each."""
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[list[Epoch]] = [[] for _ in loaders]
    for epoch in range(epochs + 1):  # the first one warms up
        for loader, measured in zip(loaders, seen, strict=True):
            found = trained(model, optimizer, loader)
            if epoch:
                measured.append(found)
    return seen


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> Epoch:
    """Train for an epoch."""
    busy, sizes, real = [], [], 0
    dist.barrier()
    begun, worked = time.perf_counter(), time.process_time()
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:]).backward()
        optimizer.step()
        sizes.append(batch.numel())
        real += int(batch.count_nonzero())
        busy.append(time.process_time() - worked)
        worked = time.process_time()
    dist.barrier()
    return Epoch(time.perf_counter() - begun, busy, sizes, real)


def slowest(ranks: Iterable[Sequence[float]]) -> float:
    """Return the sum over steps of the slowest rank."""
    return sum(map(max, zip(*ranks, strict=True)))


class Measured:
    """What a loader's epochs were: seconds, and the slowest ranks' CPU time and bytes."""

    def __init__(self, ranks: Sequence[Sequence[Epoch]]) -> None:
        epochs = list(zip(*ranks, strict=True))
        self.seconds = [max(rank.seconds for rank in epoch) for epoch in epochs]
        self.busy = [slowest(rank.busy for rank in epoch) for epoch in epochs]
        self.slowest = sum(slowest(rank.sizes for rank in epoch) for epoch in epochs)
        self.figure = self.slowest * RANKS / sum(sum(rank.sizes) for epoch in epochs for rank in epoch)


def saved(today: Sequence[float], balanced: Sequence[float]) -> float:
    """Return which part is saved, by the median of epochs that follow each other."""
    return 1 - statistics.median(after / before for before, after in zip(today, balanced, strict=True))


def table(steps: int, epochs: int) -> list[list[str]]:
    """Train each kind, and compare the time that is saved with what the costs promise."""
    rows = [["two ranks train", "epoch, s", "figure", "promised", "saved", "saved, by CPU time"]]
    texts = drawn_texts(steps)
    for number, kind in enumerate(KINDS):
        ranks = run_ranks(on_rank, RANKS, number, texts, epochs, timeout=900)
        today, balanced = (Measured([rank[loader] for rank in ranks]) for loader in range(2))
        promised = 1 - balanced.slowest / today.slowest
        seconds, busy = saved(today.seconds, balanced.seconds), saved(today.busy, balanced.busy)
        cells = [" → ".join(f"{statistics.median(one.seconds):.2f}" for one in (today, balanced))]
        cells += [f"{today.figure:.2f} → {balanced.figure:.3f}", f"{promised:.1%}"]
        cells += [f"{seconds:.1%} ({seconds / promised:.0%} of it)", f"{busy / promised:.0%} of it"]
        rows.append([kind.name, *cells])
        print(*rows[-1], flush=True)
    return rows


def drawn_texts(steps: int) -> list[str]:
    """Return texts for so many steps."""
    long_enough = [text for text in docstrings() if len(text) >= SHORTEST]
    return random.Random(0).sample(long_enough, steps * BATCH * RANKS)


def seconds_of_peers(steps: int, epochs: int) -> dict[str, tuple[float, float]]:
    """Train with each peer's loader; return the median seconds for a megabyte of texts: by the clock, and CPU time.

    The CPU time is that of the slowest rank in each step. Padding is no text, and what a sampler leaves out is not
    counted.
    """
    ranks = run_ranks(beside_peers, RANKS, drawn_texts(steps), epochs, timeout=1200)
    found = {}
    for number, peer in enumerate(PEERS):
        epochs_of = list(zip(*(rank[number] for rank in ranks), strict=True))
        megabytes = [sum(rank.real for rank in epoch) / 1e6 for epoch in epochs_of]
        clock = [max(rank.seconds for rank in epoch) for epoch in epochs_of]
        busy = [slowest(rank.busy for rank in epoch) for epoch in epochs_of]
        clock, busy = ([s / m for s, m in zip(each, megabytes, strict=True)] for each in (clock, busy))
        found[peer.name] = statistics.median(clock), statistics.median(busy)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=80, help="how many steps an epoch has")
    parser.add_argument("--epochs", type=int, default=5, help="how many epochs of each loader are timed")
    arguments = parser.parse_args()
    show(table(arguments.steps, arguments.epochs), "training")


if __name__ == "__main__":
    main()
