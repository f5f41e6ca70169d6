"""What weights add to a loader of plain numbers, and divided batches beside shares of samples.

    python benchmarks/weights.py

CPU time of rank 0, with no other rank and no workers: passes with and without weights alternate, and ratios are taken
of passes that follow each other. ``nox -s bench`` runs this; it writes a table of ``docs/benchmarks.md``.
"""

import argparse
import statistics
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pages import show_and_put
from torch.utils.data import DataLoader, Dataset

from ddp_patch import iter_with_weights, patch_dataloader_to_ddp

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
STEPS, RANKS, BATCH = 4000, 8, 64
# By how many samples one process has in a batch, so that each rank has BATCH.
SHARES = {"samples": BATCH, "batches": BATCH, "within_batches": BATCH * RANKS}


class Numbers(Dataset[int]):
    """As many samples as wanted, of no size."""

    def __len__(self) -> int:
        return STEPS * BATCH * RANKS

    def __getitem__(self, index: int) -> int:
        return index


def microseconds(batches: Iterable[Any], steps: int) -> float:
    """Return the CPU time of a step."""
    start = time.process_time()
    for _ in islice(batches, steps):
        pass
    return 1e6 * (time.process_time() - start) / steps


def table(steps: int, repeats: int) -> list[list[str]]:
    """Measure each way to share."""
    rows = [["share", "a step, us", "with weights, us (ratio)", "a sample of the rank, ns", 'beside "samples"']]
    loaders = {
        share: patch_dataloader_to_ddp(
            DataLoader(Numbers(), size, shuffle=True), share=share, rank=0, num_replicas=RANKS, seed=0
        )
        for share, size in SHARES.items()
    }
    bare: dict[str, list[float]] = {share: [] for share in loaders}
    weighed: dict[str, list[float]] = {share: [] for share in loaders}
    for _ in range(repeats + 1):  # the first pass warms up
        for share, loader in loaders.items():
            bare[share].append(microseconds(loader, steps))
            weighed[share].append(microseconds(iter_with_weights(loader), steps))
    for share in loaders:
        without, having, samples = bare[share][1:], weighed[share][1:], bare["samples"][1:]
        step = statistics.median(without)
        added, beside = (
            statistics.median(one / other for one, other in zip(*pair, strict=True))
            for pair in ((having, without), (without, samples))
        )
        cells = f"{step:.1f}", f"{statistics.median(having):.1f} ({added:.3f})", f"{1e3 * step / BATCH:.0f}"
        rows.append([f'"{share}"', *cells, f"{beside:.3f}"])
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="how many steps a pass has")
    parser.add_argument("--repeats", type=int, default=15, help="how often each pass is repeated")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    show_and_put(PAGE, "weights", table(arguments.steps, arguments.repeats))


if __name__ == "__main__":
    main()
