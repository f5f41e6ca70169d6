"""How alike steps cost on all ranks, today and dealt by ``cost=``: made-up lengths, real ones, and several samplers.

    python benchmarks/balance.py

What counts is the sum over steps of the slowest rank's cost, over the sum of the mean cost: 1 is no waiting. Streams
are those of patched loaders. All ranks' shares are computed at once, because 1024 loaders would take too long, and
each is compared with what a patched loader of the last rank gives. ``nox -s bench`` runs this; it writes tables of
``docs/benchmarks.md``.
"""

import argparse
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from textwrap import fill
from typing import Any, TypeAlias

import numpy as np
import torch
from balance_peers import PEERS, Peer
from balance_training import seconds_of_peers
from numpy.typing import NDArray
from pages import markdown, put, show, show_and_put
from texts import docstrings
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from ddp_patch import Cost, patch_dataloader_to_ddp
from ddp_patch.costs import COST_WINDOW, CostOf
from ddp_patch.orders.random_states import balancing_key
from ddp_patch.sharding.balancing import balance_window

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BATCH, TOKENS = 16, 40  # samples of a batch; what a batch by tokens holds is that of so many samples of mean length
RANKS, WINDOWS, DRAWING_RANKS = (2, 8, 64, 1024), (16, 64, 128, 256, 1024), (8, 64)
SHORT, SHORT_RANKS = 20_000, (2, 8, 64)  # samples of a short epoch
STEPS = 4 * COST_WINDOW
SHOWN = "docstrings"  # the lengths whose figures the page shows; those of the others are printed

Costs: TypeAlias = NDArray[np.float64]
Make: TypeAlias = Callable[[NDArray[np.int64], int], Any]


@dataclass(frozen=True)
class Numbers(Dataset[int]):
    """So many samples, of no size."""

    n: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


@dataclass(frozen=True)
class TokenBatches(Sampler[list[int]]):
    """Shuffled samples in batches of as many as fit into so many padded tokens, as speech and translation have them."""

    lengths: NDArray[np.int64] = field(repr=False)
    most: int

    def __iter__(self) -> Iterator[list[int]]:
        lengths, batch, longest = self.lengths.tolist(), list[int](), 0
        for index in torch.randperm(len(lengths)).tolist():
            longest = max(longest, lengths[index])
            if batch and longest * (len(batch) + 1) > self.most:
                yield batch
                batch, longest = [], lengths[index]
            batch.append(index)
        yield batch


def plain(lengths: NDArray[np.int64], size: int) -> Any:
    """A shuffled loader."""
    return DataLoader(Numbers(len(lengths)), size, shuffle=True)


def by_tokens(lengths: NDArray[np.int64], _: int) -> Any:
    """A loader with a batch sampler by tokens."""
    batches = TokenBatches(lengths, max(int(TOKENS * lengths.mean()), int(lengths.max())))
    return DataLoader(Numbers(len(lengths)), batch_sampler=batches)


def by_length(lengths: NDArray[np.int64], size: int) -> Any:
    """A loader with the sampler of Hugging Face's Trainer that groups by length."""
    return DataLoader(Numbers(len(lengths)), size, sampler=LengthGroupedSampler(size, lengths=lengths.tolist()))


@dataclass(frozen=True)
class Kind:
    """What ranks share.

    Attributes:
        name: For the table.
        make: Makes the loader.
        cost_of: What a batch costs.
        share: What a rank takes at a time.
    """

    name: str
    make: Make
    cost_of: CostOf = "sum"
    share: Any = "samples"

    @property
    def are_batches(self) -> bool:
        """Whether batches are shared whole."""
        return self.share == "batches"

    def patched(self, lengths: NDArray[np.int64], rank: int, ranks: int, **options: Any) -> Any:
        """Return a rank's loader."""
        world: Any = {"rank": rank, "num_replicas": ranks, "share": self.share, "seed": 0}
        return patch_dataloader_to_ddp(self.make(lengths, BATCH), **world, **options)

    def balanced(self, lengths: NDArray[np.int64], rank: int, ranks: int) -> Any:
        """Return a rank's loader, dealt."""
        return self.patched(lengths, rank, ranks, cost=Cost(lengths, of=self.cost_of))


KINDS = [
    Kind("samples, packed", plain),
    Kind("samples, padded", plain, "padded"),
    Kind("whole batches, packed", plain, share="batches"),
    Kind("whole batches, padded", plain, "padded", "batches"),
    Kind("batches by tokens", by_tokens, "padded", "batches"),
    Kind("`LengthGroupedSampler`", by_length, "padded", "batches"),
]
KIND = {kind.name: kind for kind in KINDS}


def bimodal(rng: np.random.Generator, n: int) -> Costs:
    """Nine short samples to a long one, which is ten times as long."""
    return np.where(rng.random(n) < 0.1, rng.normal(500, 50, n), rng.normal(50, 10, n))


def words(rng: np.random.Generator, n: int) -> Costs:
    """Draw from the lengths of real texts."""
    return rng.choice([len(text.split()) for text in docstrings()], n).astype(float)


LENGTHS: dict[str, Callable[[np.random.Generator, int], Costs]] = {
    "lognormal, sigma 0.5": lambda rng, n: 100 * rng.lognormal(sigma=0.5, size=n),
    "lognormal, sigma 1": lambda rng, n: 100 * rng.lognormal(sigma=1, size=n),
    "bimodal": bimodal,
    "docstrings": words,
}


def drawn(name: str, n: int) -> NDArray[np.int64]:
    """Return so many lengths."""
    return whole_numbers(LENGTHS[name](np.random.default_rng(0), n))


def whole_numbers(lengths: Costs) -> NDArray[np.int64]:
    """Return lengths as numbers of tokens."""
    return np.maximum(lengths, 1).astype(np.int64)


def short(sigma: float, seed: int) -> NDArray[np.int64]:
    """Return the lengths of a short epoch."""
    return whole_numbers(100 * np.random.default_rng(seed).lognormal(sigma=sigma, size=SHORT))


def figure(batches: Costs) -> float:
    """Return how long steps take, over what they took if all ranks' batches cost alike; shape (steps, ranks)."""
    return float(batches.max(axis=1).sum() / batches.mean(axis=1).sum())


def dealt(costs: Costs, ranks: int, size: int, cost_of: CostOf, window: int) -> NDArray[np.int64]:
    """Return the order of a stream that is dealt window by window, as the patch deals it."""
    items = window * ranks * size
    return np.concatenate(
        [
            start + balance_window(costs[start : start + items], ranks, size, cost_of, balancing_key(0, 0, 0, number))
            for number, start in enumerate(range(0, len(costs), items))
        ]
    )


def costs_of(costs: Costs, ranks: int, size: int, cost_of: CostOf) -> Costs:
    """Return what the batches of each whole step cost, shape (steps, ranks)."""
    whole = len(costs) // (ranks * size) * ranks * size
    items = costs[:whole].reshape(-1, size, ranks)
    return items.sum(axis=1) if cost_of == "sum" else items.max(axis=1) * size


def batch_costs(lengths: NDArray[np.int64], batches: list[list[int]], cost_of: CostOf) -> Costs:
    """Return what whole batches cost."""
    sizes = np.fromiter(map(len, batches), np.int64)
    each = lengths[np.fromiter(chain.from_iterable(batches), np.int64, int(sizes.sum()))].astype(float)
    begins = np.cumsum(sizes) - sizes
    return np.add.reduceat(each, begins) if cost_of == "sum" else np.maximum.reduceat(each, begins) * sizes


class Stream:
    """A loader's stream, and what its items cost."""

    def __init__(self, kind: Kind, lengths: NDArray[np.int64]) -> None:
        self.kind, self.lengths = kind, lengths
        batches = list(kind.patched(lengths, 0, 1).batch_sampler)
        self.size = 1 if kind.are_batches else BATCH
        if kind.are_batches:
            self.items: Any = batches
            self.costs = batch_costs(lengths, batches, kind.cost_of)
        else:
            self.items = np.fromiter(chain.from_iterable(batches), np.int64)
            self.costs = lengths[self.items].astype(float)

    def figures(self, ranks: int) -> tuple[Costs, Costs]:
        """Return what batches cost, today and balanced."""
        costs = self.costs[: STEPS * ranks * self.size]
        order = dealt(costs, ranks, self.size, self.kind.cost_of, COST_WINDOW)
        self.require_same(order, ranks)
        measured = partial(costs_of, ranks=ranks, size=self.size, cost_of=self.kind.cost_of)
        return measured(costs), measured(costs[order])

    def require_same(self, order: NDArray[np.int64], ranks: int) -> None:
        """Compare the last rank's batches with what its patched loader gives, but for the stream's end."""
        share = order[ranks - 1 :: ranks][: min(COST_WINDOW, len(order) // (ranks * self.size)) * self.size].tolist()
        loader = self.kind.balanced(self.lengths, ranks - 1, ranks)
        given = list(islice(loader.batch_sampler, len(share) // self.size))
        if self.kind.are_batches:
            expected = [self.items[place] for place in share]
        else:
            expected = self.items[share].reshape(-1, BATCH).tolist()
        if given != expected:
            raise AssertionError(f"{self.kind.name}, {ranks} ranks: the simulation gives other batches than the patch")


def figures_table(steps: int) -> list[list[str]]:
    """Return how alike steps of real texts cost for all kinds, and what part of today's time an epoch takes."""
    rows = [["sharded", *(f"{ranks} ranks" for ranks in RANKS), "time of 8 ranks"]]
    for name in LENGTHS:
        lengths = drawn(name, steps * BATCH * max(RANKS))
        for kind in KINDS:
            stream, cells, time_of_8 = Stream(kind, lengths), [], ""
            for ranks in RANKS:
                today, balanced = stream.figures(ranks)
                cells.append(f"{figure(today):.2f} → {figure(balanced):.3f}")
                if ranks == 8:
                    time_of_8 = f"{balanced.max(axis=1).sum() / today.max(axis=1).sum():.2f}"
            print(name, kind.name, *cells, time_of_8, flush=True)
            if name == SHOWN:
                rows.append([kind.name, *cells, time_of_8])
    return rows


def judged(peer: Peer, lengths: NDArray[np.int64], ranks: int) -> tuple[str, float]:
    """Return how even a peer's steps are, its padding, and the time beside the least; and what part it leaves out."""
    steps = peer.steps(lengths, BATCH, ranks)
    costs = np.array([[lengths[batch].max() * len(batch) for batch in step] for step in steps], float)
    given = [index for step in steps for batch in step for index in batch]
    real = lengths[given].sum()
    padding, time_over_least = 1 - real / costs.sum(), costs.max(axis=1).sum() * ranks / real
    return f"{figure(costs):.3f}, {padding:.1%}: {time_over_least:.3f}", 1 - len(set(given)) / len(lengths)


def peers_table(steps: int, epochs: int) -> list[list[str]]:
    """Return how samplers of other packages fare beside ``cost=``."""
    many = max(SHORT_RANKS)
    head = ["sampler", "of", *(f"{ranks} ranks" for ranks in SHORT_RANKS)]
    rows = [[*head, f"left out, {many} ranks", f"drawing, {many} ranks, s", "training, s/MB", "CPU time, s/MB"]]
    lengths, trained = short(0.8, 0), seconds_of_peers(steps, epochs)
    for peer in PEERS:
        found = [judged(peer, lengths, ranks) for ranks in SHORT_RANKS]
        start = time.process_time()
        peer.drawn(lengths, BATCH, 0, many)
        drawing = time.process_time() - start
        cells = [*(cell for cell, _ in found), f"{found[-1][1]:.1%}", f"{drawing:.3f}"]
        rows.append([peer.name, peer.of, *cells, *(f"{seconds:.1f}" for seconds in trained[peer.name])])
        print(*rows[-1], flush=True)
    return rows


def told_of_peers(table: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows that the page shows: without what drawing took, and without times of the CPU."""
    places = [place for place, name in enumerate(table[0]) if not name.startswith(("drawing", "CPU"))]
    head, *rows = [[row[place] for place in places] for row in table]
    return head, rows


def windows_table(largest: int) -> list[list[str]]:
    """Return how a window's size matters: plain arithmetic, of which the patch is not asked."""
    rows = [["sharded", "without", *map(str, WINDOWS)]]
    for name in ("lognormal, sigma 0.5", "lognormal, sigma 1", SHOWN):
        for kind in (KIND["samples, packed"], KIND["samples, padded"], KIND["whole batches, packed"]):
            for ranks in RANKS[1:]:
                lengths = drawn(name, BATCH * ranks * largest).astype(float)
                size = 1 if kind.are_batches else BATCH
                costs = lengths.reshape(-1, BATCH).sum(axis=1) if kind.are_batches else lengths
                measured = partial(costs_of, ranks=ranks, size=size, cost_of=kind.cost_of)
                cells = [f"{figure(measured(costs)):.2f}"]
                for window in WINDOWS:
                    order = dealt(costs, ranks, size, kind.cost_of, window)
                    cells.append(f"{figure(measured(costs[order])):.3f}" if window <= largest else "")
                print(name, kind.name, ranks, *cells, flush=True)
                if (name, ranks) == (SHOWN, 64):
                    rows.append([kind.name, *cells])
    return rows


def shuffled_by_python(lengths: NDArray[np.int64], size: int) -> Any:
    """A loader with a sampler that nobody knows, and that therefore is drawn whole on each rank."""

    class Own(RandomSampler):
        pass

    return DataLoader(Numbers(len(lengths)), size, sampler=Own(Numbers(len(lengths))))


DRAWING = [
    Kind("`shuffle=True`", plain),
    Kind("`shuffle=True`, padded", plain, "padded"),
    Kind("a subclass of `RandomSampler`", shuffled_by_python),
    Kind("`shuffle=True`, whole batches", plain, share="batches"),
    Kind("batches by tokens", by_tokens, "padded", "batches"),
    Kind("`LengthGroupedSampler`, whole batches", by_length, "padded", "batches"),
]


def seconds(loader: Any) -> tuple[float, float]:
    """Return the CPU time of the first batch, and of all."""
    start, first = time.process_time(), 0.0
    for number, _ in enumerate(loader.batch_sampler):
        if number == 0:
            first = time.process_time() - start
    return first, time.process_time() - start


def drawing_table(n: int, repeats: int) -> list[list[str]]:
    """Return what one rank's drawing costs, today and balanced; passes alternate."""
    lengths = drawn("lognormal, sigma 0.5", n)
    rows = [["sharded", "epoch, s (ratio)", "batch, us", "first batch, s"]]
    for kind in DRAWING:
        for ranks in DRAWING_RANKS:
            pair = kind.patched(lengths, 0, ranks), kind.balanced(lengths, 0, ranks)
            passes = [tuple(map(seconds, pair)) for _ in range(repeats + 1)][1:]  # the first pass warms up
            today, balanced = (statistics.median(one[place][1] for one in passes) for place in (0, 1))
            ratio = statistics.median(after[1] / before[1] for before, after in passes)
            first = statistics.median(after[0] for _, after in passes)
            batches = n / BATCH / ranks
            each = f"{1e6 * today / batches:.0f} → {1e6 * balanced / batches:.0f}"
            whole = f"{today:.2f} → {balanced:.2f} ({ratio:.1f})"
            print(kind.name, ranks, whole, each, f"{first:.3f}", flush=True)
            if ranks == 64:
                rows.append([kind.name, whole, each, f"{first:.3f}"])
    return rows


class InOrder(Sampler[int]):
    """A sampler that holds nothing, and that nobody knows."""

    def __init__(self, data: Sized) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data)))


def memory_table(sizes: Iterable[int]) -> list[list[str]]:
    """Return how many bytes drawing one rank's share takes at its peak, of which the stream itself takes none."""
    rows = [["samples of an epoch", *(f"{ranks} ranks, MB" for ranks in DRAWING_RANKS)]]
    in_order = Kind("in order", lambda lengths, size: DataLoader(Numbers(len(lengths)), size, sampler=InOrder(lengths)))
    for n in sizes:
        lengths, cells = drawn("lognormal, sigma 0.5", n), []
        for ranks in DRAWING_RANKS:
            peaks = []
            for loader in (in_order.patched(lengths, 0, ranks), in_order.balanced(lengths, 0, ranks)):
                tracemalloc.start()
                for _ in loader.batch_sampler:
                    pass
                peaks.append(f"{tracemalloc.get_traced_memory()[1] / 1e6:.2f}")
                tracemalloc.stop()
            cells.append(" → ".join(peaks))
        rows.append([f"{n:,}", *cells])
    return rows


def described_texts() -> str:
    """Say which texts docstrings are."""
    texts = docstrings()
    lengths = [len(text.split()) for text in texts]
    return (
        f"*Docstrings* are drawn from the lengths, in words, of the {len(texts):,} docstrings of the standard library "
        f"of Python {platform.python_version()}: {np.mean(lengths):.0f} on average, {max(lengths)} at most."
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=COST_WINDOW, help="how many steps 1024 ranks make")
    parser.add_argument("--largest-window", type=int, default=max(WINDOWS), help="the largest window that is tried")
    parser.add_argument("--samples", type=int, default=1_000_000, help="how many samples are drawn to measure the time")
    parser.add_argument("--repeats", type=int, default=3, help="how often each pass is repeated")
    parser.add_argument("--training-steps", type=int, default=40, help="how many steps an epoch of the training has")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    put(PAGE, "texts", fill(described_texts(), 120))
    show_and_put(PAGE, "figures", figures_table(arguments.steps))
    peers = peers_table(arguments.training_steps, 2)
    show(peers, "peers")
    put(PAGE, "balance-peers", markdown(*told_of_peers(peers)))
    show_and_put(PAGE, "windows", windows_table(arguments.largest_window))
    show(drawing_table(arguments.samples, arguments.repeats), "drawing")
    show(memory_table(arguments.samples * part // 10 for part in (1, 5, 10, 20)), "memory")


if __name__ == "__main__":
    main()
