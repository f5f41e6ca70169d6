"""Run scripts that others wrote under autopatch, unedited, and compare what the ranks read with what one process reads.

``python benchmarks/scripts.py FOLDER`` takes checkouts from FOLDER, each in a folder of its repository's name; further
arguments choose some. What is read is recorded from outside: where torch's loaders fetch samples, in every process.
Each script gets small data of ours.
"""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

RANKS = (2, 3)
LIMIT_S = 900.0

# Python imports it as it starts. torchrun itself, which has no rank, is let be.
RECORDER = """
import json, os, pathlib
if "RECORD_TO" in os.environ and ("RANK" in os.environ or "ALONE" in os.environ):
    from torch.utils.data._utils.fetch import _MapDatasetFetcher as Fetcher
    fetch = Fetcher.fetch
    def recording(self, index):
        indices = [int(one) for one in (index if isinstance(index, (list, tuple)) else [index])]
        place = pathlib.Path(os.environ["RECORD_TO"], str(os.getpid()))
        with place.open("a") as file:
            file.write(json.dumps([f"{type(self.dataset).__name__}, {len(self.dataset)}", indices]) + "\\n")
        return fetch(self, index)
    Fetcher.fetch = recording
"""


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        repository: The folder of its checkout.
        path: Where it is there.
        data: Makes its data, in the folder above the one that it runs in, which has a copy of its own folder beside it.
        arguments: Its own.
        options: Of ``ddp_patch run``.
        passed: Which datasets are passed over whole: an epoch at a time, each sample once. Default: all.
    """

    repository: str
    path: str
    data: Callable[[Path], object] = lambda folder: None
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()
    passed: Sequence[str] | None = None


def mnist(folder: Path) -> None:
    """Write 203 images to train on and 47 to test on, in MNIST's format."""
    numbers, raw = random.Random(0), folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, n in (("train", 203), ("t10k", 47)):
        for kind, shape, top in (("images-idx3", (n, 28, 28), 256), ("labels-idx1", (n,), 10)):
            values = bytes(numbers.randrange(top) for _ in range(n * (784 if top == 256 else 1)))
            header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(header + values)


def mutag(folder: Path) -> None:
    """Write 71 rings of three to six atoms, in the format of TUDataset."""
    raw = folder / "data" / "TU" / "MUTAG" / "raw"
    raw.mkdir(parents=True)
    lines: defaultdict[str, list[str]] = defaultdict(list)
    first = 1
    for graph in range(1, 72):
        size = 3 + graph % 4
        for place in range(size):
            here, there = first + place, first + (place + 1) % size
            lines["A"] += [f"{here}, {there}", f"{there}, {here}"]
            lines["edge_labels"] += [str(place % 4)] * 2
            lines["graph_indicator"].append(str(graph))
            lines["node_labels"].append(str(place % 7))
        lines["graph_labels"].append(str(graph % 2 * 2 - 1))
        first += size
    for name, told in lines.items():
        (raw / f"MUTAG_{name}.txt").write_text("\n".join(told) + "\n")


def words(folder: Path) -> None:
    """Write a text of 4063 blocks of 35 words, and one more."""
    (folder / "run" / "data").mkdir()
    lines = [" ".join(f"word{(line * 7 + place) % 50}" for place in range(34)) for line in range(4064)]
    (folder / "run" / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n")  # a line's end is a word, too


def names(folder: Path) -> None:
    """Write 1500 names."""
    letters = random.Random(0)
    made = {"".join(letters.choices("abcdefghij", k=6)) for _ in range(1500)}
    (folder / "run" / "names.txt").write_text("\n".join(sorted(made)))


SMALL = ("--max-steps", "3", "--n-layer", "1", "--n-embd", "8", "--n-embd2", "8", "--type", "bow")
SCRIPTS = [
    Script("examples", "mnist/main.py", lambda at: mnist(at / "data"), ("--epochs", "2", "--no-accel")),
    Script("ignite", "examples/mnist/mnist.py", lambda at: mnist(at / "run"), ("--epochs", "2")),
    # It shuffles the dataset without a seed, before it takes a part to test on.
    Script("pytorch_geometric", "examples/mutag_gin.py", mutag, ("--epochs", "2"), ("--manual-seed", "0")),
    # It looks at two batches of the validation first.
    Script("pytorch-lightning", "examples/pytorch/basics/transformer.py", words, passed=("Subset, 63",)),
    Script("tutorials", "2d_segmentation/torch/unet_training_array.py"),
    # It draws with replacement, 10,000,000,000 samples in an epoch.
    Script("makemore", "makemore.py", names, ("-i", "names.txt", *SMALL), passed=()),
]


def read_by(script: Script, folder: Path, ranks: int) -> dict[str, Counter[int]]:
    """Run a script, and return how often each sample of each dataset was read."""
    record = folder / f"record-{ranks}"
    record.mkdir()
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "ddp_patch", "run"]
    target = str(folder / "code" / Path(script.path).name)
    under = [] if ranks == 1 else ["-m", *launch, "--init-process-group", "gloo", *script.options]
    environment = {"RECORD_TO": str(record), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    if ranks == 1:
        environment["ALONE"] = "1"
    subprocess.run(  # noqa: S603 - what the list above names
        [sys.executable, *under, target, *script.arguments],
        cwd=folder / "run",
        env={**os.environ, **environment},
        check=True,
        timeout=LIMIT_S,
        stdout=subprocess.DEVNULL,
    )
    read: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for line in (line for file in record.iterdir() for line in file.read_text().splitlines()):
        dataset, indices = json.loads(line)
        read[dataset].update(indices)
    return read


def require_shared(script: Script, alone: dict[str, Counter[int]], shared: dict[str, Counter[int]], ranks: int) -> None:
    """Hold the ranks to each sample as often as in one process, but for what completes the last rounds."""
    for dataset in alone.keys() if script.passed is None else script.passed:
        once, many = alone[dataset], shared[dataset]
        passes = max(once.values())
        if any(many[index] < times for index, times in once.items()):
            raise SystemExit(f"{script.path} on {ranks} ranks lost samples of {dataset}")
        if not 0 <= many.total() - once.total() < passes * ranks:
            raise SystemExit(f"{script.path} on {ranks} ranks read {many.total()} of {dataset}, not {once.total()}")


def main(checkouts: Path, *repositories: str) -> None:
    """Run the scripts, in one process first, which prepares what ranks would prepare at the same time."""
    for script in SCRIPTS:
        if repositories and script.repository not in repositories:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "run").mkdir()
            (folder / "sitecustomize.py").write_text(RECORDER)
            shutil.copytree((checkouts / script.repository / script.path).parent, folder / "code")
            script.data(folder)
            alone = read_by(script, folder, 1)
            for ranks in RANKS:
                shared = read_by(script, folder, ranks)
                require_shared(script, alone, shared, ranks)
                told = {name: (alone[name].total(), shared[name].total()) for name in alone}
                print(f"{script.repository}/{script.path} on {ranks} ranks: {told}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
