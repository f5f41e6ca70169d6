"""What ``import ddp_patch`` adds to ``import torch``, in processes of their own, as ``python -X importtime`` tells.

Prints a table. Run it with ``nox -s imports``.
"""

import argparse
import re
import statistics
import subprocess
import sys

from pages import show

LINE = re.compile(r"import time:\s+(?P<own>\d+) \|\s+(?P<all>\d+) \|(?P<depth> +)(?P<module>\S+)")


def measure() -> dict[str, float]:
    """The milliseconds of one process, which sees the installed package alone.

    Without garbage collection: after torch, one run of it takes 80 ms, and falls into whatever is imported next.
    """
    command = [
        sys.executable,
        "-I",
        "-X",
        "importtime",
        "-c",
        "import gc; gc.disable(); import torch; import ddp_patch",
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()  # noqa: S603 - as above
    told = {found["module"]: found for found in map(LINE.fullmatch, lines) if found}
    own = sum(int(found["own"]) for module, found in told.items() if module.split(".")[0] == "ddp_patch")
    return {
        "import torch": int(told["torch"]["all"]) / 1000,
        "import ddp_patch, after it": int(told["ddp_patch"]["all"]) / 1000,
        "of which its own modules": own / 1000,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=15, help="how many processes are started")
    repeats = parser.parse_args().repeats
    measure()  # the first reads the files from the disk, and may compile them
    runs = [measure() for _ in range(repeats)]
    columns = ("statement", "median ms", "fastest ms")
    rows = [(name, *(f"{of(run[name] for run in runs):,.1f}" for of in (statistics.median, min))) for name in runs[0]]
    show([columns, *rows], f"{repeats} processes")


if __name__ == "__main__":
    main()
