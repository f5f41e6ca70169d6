"""Measure what an audit of a large loader takes: time, and the peak of the process's memory.

``nox -s audit`` runs it, for ten million samples and for 1024 ranks; ``-- --n 1000000`` is short.
"""

import argparse
import resource
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_patch import audit

# Bytes in a unit of ru_maxrss: Linux counts in KiB, macOS in bytes.
_UNIT = 1 if sys.platform == "darwin" else 1024


def main() -> None:
    """Audit a shuffled loader, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10**7, help="how many samples")
    parser.add_argument("--world-size", type=int, default=8, help="how many ranks")
    parser.add_argument("--epochs", type=int, default=2, help="how many epochs of each")
    parser.add_argument("--most-seconds", type=float, default=float("inf"), help="fail if it takes longer")
    parser.add_argument("--most-mib", type=float, default=float("inf"), help="fail if it takes more memory")
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = _peak()
    loader: DataLoader[Any] = DataLoader(range(given.n), batch_size=256, shuffle=True)
    begun, worked = time.perf_counter(), time.process_time()
    report = audit(loader, given.world_size, given.epochs, max_items=given.n)
    taken, work = time.perf_counter() - begun, time.process_time() - worked
    report.raise_for_problems()
    print(
        f"{given.n} samples, {given.world_size} ranks, {given.epochs} epochs: {taken:.0f} s, {work:.0f} s of "
        f"them on a core; at most {_peak() / 2**20:.0f} MiB in all, {before / 2**20:.0f} MiB before it began"
    )
    if work > given.most_seconds or _peak() / 2**20 > given.most_mib:
        sys.exit(f"That is more than {given.most_seconds:g} s on a core or {given.most_mib:g} MiB.")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


if __name__ == "__main__":
    main()
