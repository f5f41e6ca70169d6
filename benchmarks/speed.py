"""How fast a rank gets its share, and what it holds meanwhile: beside others, and beside torch's permutation.

    python benchmarks/speed.py --largest 8 --repeats 3

Every case (implementation, sampler, n, world size) runs in a process of its own, as rank 0, with no other rank: after a
warm-up on few samples it takes the batches of 64 indices of a whole epoch. Told are the seconds until the first batch,
those of the epoch, and by how much the process grew at its peak: medians, and ratios of them. Writes
``docs/benchmarks.md`` and its pictures.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_patch import DDPSamplerWrapper, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.samplers import ScalableRandomSampler

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
ON_THE_PAGE = {"peers", "streams"}  # of the tables that are printed
BATCH, WORLD, N = 64, 8, 10**7
PEERS = ("accelerate", "lightning", "pytorch-ignite", "open-metric-learning", "datasets", "webdataset")


class Numbers(Dataset[int]):
    """As many samples as wanted, of no size."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class OfTheUser(RandomSampler):
    """Torch's in all but its type, so that nothing is known of its order."""


class Counting(Sampler[int]):
    """The fastest sampler that Python code can be."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):  # noqa: UP028 - its own loop is what is measured
            yield index


class Batches(BatchSampler):
    """A batch sampler of the user's, around a shuffled epoch."""


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "RandomSampler": lambda n: RandomSampler(Numbers(n)),
    "SequentialSampler": lambda n: SequentialSampler(Numbers(n)),
    "SubsetRandomSampler": lambda n: SubsetRandomSampler(range(n)),
    "WeightedRandomSampler": lambda n: WeightedRandomSampler(torch.ones(n), n),  # type: ignore[arg-type]
    "RandomSampler, replacement": lambda n: RandomSampler(Numbers(n), replacement=True),
    "RandomSampler, num_samples": lambda n: RandomSampler(Numbers(n), num_samples=n // 2),
    "a subclass of RandomSampler": lambda n: OfTheUser(Numbers(n)),
    "a generator of numbers": Counting,
    "a batch sampler": lambda n: Batches(RandomSampler(Numbers(n)), BATCH, drop_last=False),
}


# Implementations: how each gives rank 0 its batches of indices.


def permuted(sampler: Any, world_size: int) -> Iterable[Any]:
    """Draw the permutation as torch does, and keep every world_size-th index as a Python int."""
    share = torch.randperm(len(sampler))[::world_size].tolist()
    for start in range(0, len(share), BATCH):
        yield share[start : start + BATCH]


def bare(sampler: Any, world_size: int) -> Iterable[Any]:
    """Iterate the sampler and do nothing."""
    return sampler  # type: ignore[no-any-return]


def ours(sampler: Any, world_size: int, **options: Any) -> Iterable[Any]:
    """Patch a loader."""
    kind = "batch_sampler" if isinstance(sampler, BatchSampler) else "sampler"
    loader: DataLoader[Any] = DataLoader(
        Numbers(len(sampler)), **({"batch_size": BATCH} if kind == "sampler" else {}), **{kind: sampler}
    )
    patched = patch_dataloader_to_ddp(loader, rank=0, num_replicas=world_size, **options)
    return patched.batch_sampler or ()


def unbatched(sampler: Any, world_size: int) -> Iterable[Any]:
    """The share alone, to compare with a bare loop over the sampler."""
    return DDPSamplerWrapper(sampler, False, rank=0, num_replicas=world_size)


def scalable(sampler: Any, world_size: int) -> Iterable[Any]:
    """Patch a loader, with a scalable shuffle."""
    return ours(ScalableRandomSampler(len(sampler), seed=1), world_size)


def from_the_middle(sampler: Any, world_size: int) -> Iterable[Any]:
    """Patch a loader, with a scalable shuffle, and go on from the middle of an epoch."""
    n = len(sampler)
    given: DataLoader[Any] = DataLoader(Numbers(n), BATCH, sampler=ScalableRandomSampler(n, seed=1))
    patched = patch_dataloader_to_ddp(given, rank=0, num_replicas=world_size)
    half = n // world_size // BATCH // 2 * BATCH
    restore_loader(patched, loader_state(patched) | {"taken": [world_size * half]})
    return patched.batch_sampler or ()


def torchs(sampler: Any, world_size: int) -> Iterable[Any]:
    """Torch's DistributedSampler."""
    return BatchSampler(DistributedSampler(Numbers(len(sampler)), world_size, 0), BATCH, drop_last=False)


def accelerates(sampler: Any, world_size: int) -> Iterable[Any]:
    """accelerate, as its prepare() wraps a batch sampler."""
    from accelerate.data_loader import BatchSamplerShard

    return BatchSamplerShard(BatchSampler(sampler, BATCH, drop_last=False), num_processes=world_size, process_index=0)


def lightnings(sampler: Any, world_size: int) -> Iterable[Any]:
    """Lightning, as its Trainer and Fabric wrap a sampler."""
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    return BatchSampler(DistributedSamplerWrapper(sampler, num_replicas=world_size, rank=0), BATCH, drop_last=False)


def ignites(sampler: Any, world_size: int) -> Iterable[Any]:
    """ignite, as its auto_dataloader wraps a sampler."""
    from ignite.distributed.auto import DistributedProxySampler

    return BatchSampler(DistributedProxySampler(sampler, world_size, 0), BATCH, drop_last=False)


def omls(sampler: Any, world_size: int) -> Iterable[Any]:
    """open-metric-learning; it asks a process group, so it gets one that sends nothing."""
    from oml.ddp.patching import DDPSamplerWrapper as Theirs
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return BatchSampler(Theirs(sampler, shuffle_samples_between_gpus=False), BATCH, drop_last=False)


IMPLEMENTATIONS: dict[str, Callable[[Any, int], Iterable[Any]]] = {
    "`torch.randperm`": permuted,
    "bare loop": bare,
    "ddp_patch": ours,
    "ddp_patch, unbatched": unbatched,
    "ddp_patch, scalable": scalable,
    "ddp_patch, scalable, from the middle": from_the_middle,
    "torch DistributedSampler": torchs,
    "accelerate": accelerates,
    "Lightning": lightnings,
    "ignite": ignites,
    "open-metric-learning": omls,
}
BESIDE = ("torch DistributedSampler", "accelerate", "Lightning", "ignite", "open-metric-learning")


# One case, in a process of its own.


def measure(implementation: str, sampler: str, n: int, world_size: int, repeats: int, steps: int | None) -> list[float]:
    """Return the medians of: seconds to the first batch, seconds of the epoch, MB of growth at the peak."""
    make, wrap = SAMPLERS[sampler], IMPLEMENTATIONS[implementation]
    for _ in range(3):
        _epoch(wrap(make(world_size * BATCH * 4), world_size), None)
    times = []
    for _ in range(repeats):
        iterable = wrap(make(n), world_size)
        gc.collect()
        before = _reset_peak()
        first, whole = _epoch(iterable, steps)
        times.append((first, whole, (_peak() - before) / 2**20))
    return [statistics.median(values) for values in zip(*times, strict=True)]


def _epoch(iterable: Iterable[Any], steps: int | None) -> tuple[float, float]:
    start = time.perf_counter()
    iterator = iter(iterable)
    next(iterator)
    first = time.perf_counter() - start
    for _ in iterator if steps is None else islice(iterator, steps):
        pass
    return first, time.perf_counter() - start


def _reset_peak() -> int:
    """Forget the process's peak so far (Linux), and return what it holds now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def _peak() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def case(implementation: str, sampler: str, n: int, world_size: int, repeats: int, steps: int | None = None) -> Any:
    """Run ``measure`` in a process of its own."""
    given = json.dumps([implementation, sampler, n, world_size, repeats, steps])
    command = [sys.executable, "-W", "ignore", __file__, "--case", given]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this script
    if result.returncode:
        raise RuntimeError(f"{given} failed:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


# The tables.


def beside_the_peers(n: int, repeats: int) -> list[list[str]]:
    """All implementations over one shuffled epoch."""
    names = ("`torch.randperm`", "ddp_patch", *BESIDE)
    found = {name: case(name, "RandomSampler", n, WORLD, repeats) for name in names}
    plain, fastest = found["`torch.randperm`"], min(found[name][1] for name in BESIDE)
    smallest = min(found[name][2] for name in BESIDE)
    rows = [["", "first batch, s", "epoch, s", "memory, MB"]]
    for name, (first, epoch, growth) in found.items():
        ratios = f"{epoch / plain[1]:.2f}", f"{growth / plain[2]:.2f}"
        rows.append([name, f"{first:.3f}", f"{epoch:.2f} ({ratios[0]})", f"{growth:.0f} ({ratios[1]})"])
    rows.append(["fastest peer / ddp_patch", "", f"{fastest / found['ddp_patch'][1]:.1f}", ""])
    rows.append(["smallest peer / ddp_patch", "", "", f"{smallest / max(found['ddp_patch'][2], 0.1):.1f}"])
    return rows


def samplers(n: int, repeats: int) -> list[list[str]]:
    """This package beside a bare loop over the same sampler."""
    rows = [["sampler", "epoch, s (ratio)", "first, s", "memory, MB"]]
    for name in SAMPLERS:
        _, bare_epoch, bare_growth = case("bare loop", name, n, WORLD, repeats)
        kind = "ddp_patch" if name == "a batch sampler" else "ddp_patch, unbatched"
        first, epoch, growth = case(kind, name, n, WORLD, repeats)
        both = f"{bare_epoch:.3f} → {epoch:.3f} ({epoch / bare_epoch:.2f})"
        rows.append([name, both, f"{first:.4f}", f"{bare_growth:.0f} → {growth:.0f}"])
    return rows


def scalable_shuffles(repeats: int) -> list[list[str]]:
    """The scalable shuffle on rank 0 of 1024."""
    rows = [["n", "first batch, ms", "from the middle, ms", "an index, ns", "memory, MB"]]
    steps = 4000
    for exponent in (9, 12):
        n = 10**exponent
        first, whole, growth = case("ddp_patch, scalable", "RandomSampler", n, 1024, repeats, steps)
        middle, _, _ = case("ddp_patch, scalable, from the middle", "RandomSampler", n, 1024, repeats, 1)
        each = 1e9 * whole / ((steps + 1) * BATCH)
        rows.append([f"10^{exponent}", f"{1e3 * first:.2f}", f"{1e3 * middle:.2f}", f"{each:.0f}", f"{growth:.1f}"])
    return rows


# The pictures.


def growing(largest: int, repeats: int) -> dict[str, dict[str, list[list[float]]]]:
    """Each implementation against n, and against the world size."""
    found: dict[str, dict[str, list[list[float]]]] = {"n": {}, "world": {}}
    for name in ("ddp_patch", "ddp_patch, scalable", *BESIDE):
        found["n"][name] = [
            [10**e, *case(name, "RandomSampler", 10**e, WORLD, 1 if e > 7 else repeats)] for e in range(5, largest + 1)
        ]
        found["world"][name] = [
            [w, *case(name, "RandomSampler", 10 ** min(largest, 7), w, 1)] for w in (1, 8, 64, 1024, 16384)
        ]
    return found


def draw(found: dict[str, dict[str, list[list[float]]]]) -> None:
    """Write docs/benchmarks-n.svg and docs/benchmarks-world.svg."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ddp_patch"
    for against, lines in found.items():
        figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for place, (axis, what) in enumerate(
            zip(axes, ("seconds of an epoch", "MB of growth at the peak"), strict=True)
        ):
            for (name, points), marker in zip(lines.items(), "osv^<>D", strict=True):
                style = {"linewidth": 2.5} if name.startswith("ddp_patch") else {"linestyle": "--"}
                values = [max(point[2 + place], 1e-3 if place == 0 else 0.1) for point in points]
                axis.plot([point[0] for point in points], values, marker=marker, label=name, **style)
            axis.set(xscale="log", yscale="log", ylabel=what)
            axis.set_xlabel("samples, 8 ranks" if against == "n" else "ranks, 10 million samples")
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)
        figure.savefig(PAGE.with_name(f"benchmarks-{against}.svg"), metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Measure, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--largest", type=int, default=8, help="the largest n, as a power of ten, from 5 to 8")
    parser.add_argument("--repeats", type=int, default=3, help="how often each case is repeated")
    parser.add_argument(
        "--only", nargs="+", choices=("peers", "samplers", "scalable", "streams"), help="measure these tables alone"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        np.random.seed(0)
        print(json.dumps(measure(*json.loads(arguments.case))))
        return
    n = 10 ** min(arguments.largest, 7)
    tables: dict[str, Callable[[], list[list[str]]]] = {
        "peers": lambda: beside_the_peers(n, arguments.repeats),
        "samplers": lambda: samplers(n, arguments.repeats),
        "scalable": lambda: scalable_shuffles(arguments.repeats),
        "streams": lambda: streams.table(),
    }
    import streams  # not where a case is measured: what these import takes memory
    from pages import show, show_and_put

    for name in arguments.only or tables:
        if name in ON_THE_PAGE:
            show_and_put(PAGE, name, tables[name](), name, grouped=name == "streams")
        else:
            show(tables[name](), name)
    if arguments.only:
        return
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "numpy", *PEERS))
    show_and_put(PAGE, "versions", [["measured with"], [f"{versions}; n = {n:,}"]], "versions")
    draw(growing(arguments.largest, arguments.repeats))


if __name__ == "__main__":
    main()
