"""Measure the samplers against a permutation, and draw what their batches look like, for ``docs/samplers.md``."""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from pages import show
from torch.utils.data import BatchSampler, RandomSampler

from ddp_patch import DDPSamplerWrapper
from ddp_patch.samplers import (
    GroupedBatchSampler,
    IterationBatchSampler,
    LengthBucketBatchSampler,
    PKBatchSampler,
    ScalableRandomSampler,
    WeightedClassSampler,
    WindowSampler,
    aspect_ratio_groups,
)

PAGE = Path(__file__).parents[1] / "docs" / "samplers.md"
SEED = 0


# Speed.


def labels_of(n: int, classes: int) -> Any:
    """Labels by Zipf's law: the first class has most samples."""
    shares = 1 / np.arange(1, classes + 1)
    return np.random.default_rng(SEED).choice(classes, n, p=shares / shares.sum())


def lengths_of(n: int) -> Any:
    """Lengths as of sentences: most short, few long."""
    return np.minimum(1 + np.random.default_rng(SEED).geometric(0.02, n), 512)


# Each draws n samples in an epoch.
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "WeightedClassSampler, 10 classes": lambda n: WeightedClassSampler(labels_of(n, 10), np.ones(10), n, seed=SEED),
    "PKBatchSampler, 32 x 4": lambda n: PKBatchSampler(np.arange(2 * n) // 8, 32, 4, seed=SEED),
    "GroupedBatchSampler over range(n)": lambda n: GroupedBatchSampler(range(n), labels_of(n, 10), 64),
    "GroupedBatchSampler over WeightedClassSampler": lambda n: GroupedBatchSampler(
        WeightedClassSampler(labels_of(n, 10), np.ones(10), n, seed=SEED), labels_of(n, 7), 64
    ),
    "LengthBucketBatchSampler": lambda n: LengthBucketBatchSampler(lengths_of(n), max_tokens=4096, seed=SEED),
    "WindowSampler": lambda n: WindowSampler(10 * n, 10, seed=SEED),
    "ScalableRandomSampler": lambda n: ScalableRandomSampler(n, seed=SEED),
}


def median(call: Callable[[], object], repeats: int) -> float:
    """Return the median of the seconds that a call takes."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def drawn(sampler: Any, epochs: Any) -> None:
    """Draw an epoch of indices as a whole; of batches, of which one is looked up then."""
    if not sampler.has_random_access:
        next(iter(sampler))
        return
    is_of_batches = isinstance(sampler, GroupedBatchSampler | LengthBucketBatchSampler | PKBatchSampler)
    sampler.items_at(np.arange(1 if is_of_batches else len(sampler)), next(epochs))


def iterated(sampler: Any) -> None:
    """Go through an epoch, in Python."""
    for _ in sampler:
        pass


def speed(n: int, repeats: int) -> list[list[str]]:
    """Each sampler beside numpy's permutation of as many."""
    rng = np.random.default_rng(SEED)
    floor = median(lambda: rng.permutation(n), 2 * repeats + 1)
    rows = [["an epoch of n samples", "drawn, s", "iterated, s"]]
    rows.append(["numpy's permutation", f"{floor:.3f} (1.00)", ""])
    for name, make in SAMPLERS.items():
        sampler, epochs = make(n), iter(range(10**6))
        once = median(lambda s=sampler, e=epochs: drawn(s, e), repeats)
        whole = median(lambda s=sampler: iterated(s), 1)
        rows.append([name, f"{once:.3f} ({once / floor:.2f})", f"{whole:.2f} ({whole / floor:.1f})"])
    return rows


# Pictures.


def cells(axis: Any, batches: list[list[int]], colour_of: Any, title: str, colours: int) -> None:
    """Draw a row for each batch and a cell for each sample, coloured by what it is."""
    widest = max(map(len, batches))
    grid = np.full((len(batches), widest), np.nan)
    for row, batch in enumerate(batches):
        grid[row, : len(batch)] = [colour_of[index] for index in batch]
    colour_map = mpl.colormaps["tab20" if colours > 10 else "tab10"]
    axis.pcolormesh(grid, cmap=colour_map, vmin=0, vmax=colour_map.N, edgecolors="white", linewidth=0.7)
    axis.set(title=title, xlabel="sample of the batch", ylabel="batch", aspect="equal")
    axis.set_yticks(np.arange(0, len(batches), 4) + 0.5, np.arange(0, len(batches), 4))
    axis.set_xticks([])
    axis.invert_yaxis()
    axis.spines[:].set_visible(False)


def class_balanced() -> Any:
    """A shuffled epoch beside a balanced one."""
    labels = labels_of(600, 6)
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.2), layout="constrained")
    torch.manual_seed(SEED)
    plain = BatchSampler(RandomSampler(range(600)), 16, drop_last=False)
    balanced = BatchSampler(WeightedClassSampler.upsample(labels, seed=SEED), 16, drop_last=False)
    cells(axes[0], list(islice(plain, 12)), labels, "shuffle=True", 6)
    cells(axes[1], list(islice(balanced, 12)), labels, "WeightedClassSampler.upsample", 6)
    return figure


def p_x_k() -> Any:
    """P x K batches of two epochs."""
    labels = np.repeat(np.arange(12), np.random.default_rng(SEED).integers(2, 12, 12))
    figure, axis = plt.subplots(figsize=(4, 2.6), layout="constrained")
    batches = PKBatchSampler(labels, 4, 4, seed=SEED)
    cells(axis, [*batches, *batches], labels, "p=4, k=4: two epochs of 12 labels", 12)
    axis.axhline(3, color="black", linewidth=1)
    return figure


def grouped() -> Any:
    """A shuffled epoch, and the same one in groups."""
    rng = np.random.default_rng(SEED)
    groups = aspect_ratio_groups(rng.choice([480, 640, 1024], 88), rng.choice([480, 640], 88), edges=(0.9, 1.5))
    order = rng.permutation(88).tolist()
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.6), layout="constrained")
    cells(axes[0], [order[start : start + 8] for start in range(0, 88, 8)], groups, "the sampler's order", 3)
    cells(axes[1], list(GroupedBatchSampler(order, groups, 8)), groups, "GroupedBatchSampler", 3)
    return figure


def by_length() -> Any:
    """The padded tokens of batches: plain ones, and those of a budget."""
    lengths = lengths_of(400)
    torch.manual_seed(SEED)
    plain = BatchSampler(RandomSampler(range(400)), 8, drop_last=False)
    similar = LengthBucketBatchSampler(lengths, max_tokens=512, max_padding=0.2, seed=SEED)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    for axis, batches, title in zip(
        axes, (plain, similar), ("shuffle=True, batch_size=8", "max_tokens=512, max_padding=0.2"), strict=True
    ):
        every = [lengths[batch] for batch in batches]
        waste = 1 - sum(batch.sum() for batch in every) / sum(len(batch) * batch.max() for batch in every)
        for place, batch in enumerate(every[:16]):
            padded = len(batch) * batch.max()
            axis.bar(place, padded, color="lightgrey", label="padding" if place == 0 else None)
            axis.bar(place, batch.sum(), color="tab:blue", label="tokens" if place == 0 else None)
            axis.text(place, padded, len(batch), ha="center", va="bottom", fontsize=7)
        axis.set(title=f"{title}\n{waste:.0%} of an epoch is padding", xlabel="batch (its samples above)", xticks=[])
    axes[1].axhline(512, color="black", linewidth=1, linestyle="--")
    axes[0].set_ylabel("tokens of the padded batch")
    axes[0].legend()
    return figure


def by_iterations() -> Any:
    """A training over several epochs, and the same one begun later."""
    batches = BatchSampler(ScalableRandomSampler(30, seed=SEED), 6, drop_last=False)
    figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
    for row, start in enumerate((0, 8)):
        sampler = IterationBatchSampler(batches, 17, start_iteration=start)
        for iteration, batch in enumerate(sampler, start=start):
            axes.barh(row, 1, left=iteration, color=f"C{iteration // 5}", edgecolor="white")
            axes.text(iteration + 0.5, row, "\n".join(map(str, batch)), ha="center", va="center", fontsize=7)
    axes.set_yticks([0, 1], ["start_iteration=0", "start_iteration=8"])
    axes.set(xlabel="iteration; the colour is the epoch, the numbers are the batch", xticks=range(0, 18, 5))
    axes.invert_yaxis()
    return figure


def windows() -> Any:
    """The windows of two epochs, by the rank that gets them."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for axis, shuffle in zip(axes, (True, False), strict=True):
        for epoch in range(2):
            for rank in range(2):
                sampler = WindowSampler(100, 12, shuffle=shuffle, seed=SEED)
                share: Any = DDPSamplerWrapper(sampler, False, num_replicas=2, rank=rank, uneven="keep")
                share.set_epoch(epoch)
                for step, start in enumerate(share):
                    stops = [(start, min(start + 12, 100)), (0, start + 12 - 100)]
                    for begin, stop in stops if start + 12 > 100 else stops[:1]:
                        axis.barh(
                            step + 7 * epoch, stop - begin, left=begin, height=0.8, color=f"C{rank}", edgecolor="white",
                            label=f"rank {rank}" if (epoch, step) == (0, 0) else None,
                        )  # fmt: skip
        axis.axhline(5.5, color="black", linewidth=1)
        axis.set(
            title=f"shuffle={shuffle}", xlabel="time (the series is a ring of 100 points)", xlim=(0, 100), yticks=[2, 9]
        )
        axis.set_yticklabels(["epoch 0", "epoch 1"])
    axes[0].set_ylabel("a row for each step")
    axes[0].invert_yaxis()  # which both share
    axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def scalable() -> Any:
    """What stands where in two epochs."""
    sampler = ScalableRandomSampler(100_000, seed=SEED)
    positions = np.arange(0, 100_000, 200)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", sharey=True)
    for epoch, axis in enumerate(axes):
        axis.plot(positions, sampler.items_at(positions, epoch), ".", markersize=2)
        axis.set(title=f"epoch {epoch}", xlabel="every 200th position of 100,000", ylabel="" if epoch else "sample")
        ticks = [0, 50_000, 100_000]
        axis.set_xticks(ticks, ["0", "50,000", "100,000 "], ha="center")
        axis.set_yticks(ticks, ["0", "50,000", "100,000"])
    return figure


PICTURES = [class_balanced, p_x_k, grouped, by_length, by_iterations, windows, scalable]


def draw() -> None:
    """Write docs/samplers-*.svg."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ddp_patch"
    for picture in PICTURES:
        figure = picture()
        figure.savefig(PAGE.with_name(f"samplers-{picture.__name__}.svg"), metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Draw the pictures, then measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--n", type=int, default=10**7, help="how many samples an epoch has")
    parser.add_argument("--repeats", type=int, default=3, help="how often each epoch is drawn")
    arguments = parser.parse_args()
    draw()
    show(speed(arguments.n, arguments.repeats), "speed")


if __name__ == "__main__":
    main()
