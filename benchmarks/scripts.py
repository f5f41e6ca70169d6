"""Run scripts that others wrote as one process on 1, 2 and 3 ranks, unedited, and compare what the ranks do.

``python benchmarks/scripts.py FOLDER`` takes checkouts from FOLDER, each in a folder of its repository's name; further
arguments choose some. Each script gets small data of ours. Recorded from outside, in every process: what torch's
loaders fetch, and the parameters at the end.

Each runs twice. The first time it is as it is. The second time what ranks cannot share with one process stands still:
dropout passes all, batch normalisation takes its running numbers, transforms of a sample draw from the sample's own
seed, and all is in double precision. Then all ranks must end with the parameters of one, and print its evaluation.
"""

import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

RANKS = (1, 2, 3)
LIMIT_S = 900.0
CLOSE = 1e-7  # of the largest parameter, in double precision

# Python imports it as it starts. What starts the ranks, which has no rank, is let be.
RECORDER = """
import atexit, json, os, pathlib
if "RECORD_TO" in os.environ and "RANK" in os.environ:
    import torch
    from torch.nn import functional
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data._utils.fetch import _MapDatasetFetcher as Fetcher
    folder, still, optimizers = pathlib.Path(os.environ["RECORD_TO"]), os.environ["STILL"] == "True", {}
    steps, write = [0], torch.save
    fetch, normalise, attend = Fetcher.fetch, functional.batch_norm, functional.scaled_dot_product_attention

    def recording(self, index):
        is_batch, dataset = isinstance(index, (list, tuple)), self.dataset
        indices = [int(one) for one in (index if is_batch else [index])]
        line = json.dumps([f"{type(dataset).__name__}, {len(dataset)}", torch.is_grad_enabled(), indices])
        with (folder / f"{os.environ['RANK']}-{os.getpid()}.jsonl").open("a") as file:
            file.write(line + "\\n")
        if not (still and is_batch and hasattr(dataset, "set_random_state")):  # as MONAI's have it
            return fetch(self, index)
        samples = [(dataset.set_random_state(seed=one), dataset[one])[1] for one in indices]
        return [each.double() for each in self.collate_fn(samples)]

    def steady(input, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        return normalise(input, mean, var, weight, bias, False, momentum, eps)

    def attending(query, key, value, attn_mask=None, dropout_p=0.0, *args, **options):
        return attend(query, key, value, attn_mask, 0.0, *args, **options)

    def count(optimizer, *_):
        optimizers[id(optimizer)] = optimizer
        steps[0] += 1
        if steps[0] == int(os.environ["STEPS"]):
            save()

    def save():
        groups = [group["params"] for optimizer in optimizers.values() for group in optimizer.param_groups]
        write([each.detach() for group in groups for each in group], folder / f"{os.environ['RANK']}.pt")

    Fetcher.fetch = recording
    register_optimizer_step_post_hook(count)
    if os.environ["STEPS"] == "0":
        atexit.register(save)
    if still:
        torch.set_default_dtype(torch.float64)
        functional.dropout = functional.dropout2d = lambda input, *args, **options: input
        functional.batch_norm, functional.scaled_dot_product_attention = steady, attending
"""

# How often each sample was read, by its dataset and whether that was under grad.
Reads: TypeAlias = dict[tuple[str, bool], Counter[int]]


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        repository: The folder of its checkout.
        path: Where it is there.
        evaluation: Finds the numbers of its evaluations in what it prints.
        data: Makes its data, in the folder above the one that it runs in, which has a copy of its own folder beside it.
        arguments: Its own.
        looked: Datasets of which it takes a few batches ahead, as workers please.
        steps: Compare the parameters after so many steps of the optimizer, and no evaluation: from then on, its
            training makes much of a rounding, on one rank, too. Default: compare at the end.
    """

    repository: str
    path: str
    evaluation: str
    data: Callable[[Path], object] = lambda folder: None
    arguments: Sequence[str] = ()
    looked: Sequence[str] = ()
    steps: int = 0


@dataclass
class Ran:
    """What a script did on some ranks: what it printed, what each rank read, and each one's last parameters."""

    lines: list[str]
    reads: list[Reads]
    parameters: list[list[torch.Tensor]] = field(repr=False)


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


SMALL = ("--max-steps", "501", "--n-layer", "1", "--n-embd", "8", "--n-embd2", "8", "--type", "bow")
SCRIPTS = [
    Script(
        "examples",
        "mnist/main.py",
        r"Average loss: ([\d.]+), Accuracy: (\d+)",
        lambda at: mnist(at / "data"),
        ("--epochs", "2", "--no-accel"),
    ),
    Script(
        "ignite",
        "examples/mnist/mnist.py",
        r"Results.*accuracy: ([\d.]+) Avg loss: ([\d.]+)",
        lambda at: mnist(at / "run"),
        ("--epochs", "2"),
    ),
    Script("pytorch_geometric", "examples/mutag_gin.py", r"Train: ([\d.]+), Test: ([\d.]+)", mutag, ("--epochs", "2")),
    Script("pytorch-lightning", "examples/pytorch/basics/transformer.py", r"test_loss\D+([\d.]+)", words, steps=12),
    Script(
        "tutorials",
        "2d_segmentation/torch/unet_training_array.py",
        r"current mean dice: (\d\.\d+)",
        looked=("ArrayDataset, 40",),
    ),
    # It draws with replacement, 10,000,000,000 samples in an epoch.
    Script(
        "makemore",
        "makemore.py",
        r"train loss: ([\d.]+) test loss: ([\d.]+)",
        names,
        ("-i", "names.txt", "--num-workers", "0", *SMALL),
    ),
]


def ran(script: Script, folder: Path, ranks: int, *, still: bool) -> Ran:
    """Run a script on some ranks, and return what was recorded."""
    record = folder / f"record-{ranks}-{still}"
    record.mkdir()
    own = {"RECORD_TO": str(record), "STILL": str(still), "STEPS": str(script.steps)}
    own |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    own["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    target = str(folder / "code" / Path(script.path).name)
    done = subprocess.run(  # noqa: S603 - what the list above names
        [sys.executable, "-m", "ddp_patch", "run", "-n", str(ranks), "--seed", "0", target, *script.arguments],
        cwd=folder / "run",
        env={**os.environ, **own},
        check=True,
        timeout=LIMIT_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    reads: list[Reads] = [defaultdict(Counter) for _ in range(ranks)]
    for place in record.glob("*.jsonl"):
        for line in place.read_text().splitlines():
            dataset, is_training, indices = json.loads(line)
            if dataset not in script.looked:
                reads[int(place.name.partition("-")[0])][dataset, is_training].update(indices)
    return Ran(done.stdout.splitlines(), reads, [torch.load(record / f"{rank}.pt") for rank in range(ranks)])


def evaluated(script: Script, told: Ran) -> list[float]:
    """Return the numbers of the evaluations that a script has printed."""
    found = re.finditer(script.evaluation, "\n".join(told.lines))
    return [float(value) for match in found for value in match.groups()]


def require_alike(script: Script, one: Ran, many: Ran, *, still: bool) -> float:
    """Hold the ranks to what one does; return the largest difference of a parameter, as a part of the largest one."""
    ranks = len(many.reads)
    for key, times in one.reads[0].items():
        name, is_training = key
        together = sum((reads[key] for reads in many.reads), Counter[int]())
        if is_training and together != times:
            raise SystemExit(f"{script.path} on {ranks} ranks trained on {together} of {name}, not {times}")
        if not is_training and any(reads[key] != times for reads in many.reads):
            raise SystemExit(f"{script.path} on {ranks} ranks did not evaluate all of {name} on each rank")
    if len(one.lines) != len(many.lines):
        raise SystemExit(f"{script.path} on {ranks} ranks printed {len(many.lines)} lines, not {len(one.lines)}")
    first = many.parameters[0]
    if any(not torch.equal(*pair) for own in many.parameters for pair in zip(first, own, strict=True)):
        raise SystemExit(f"{script.path}: the ranks ended with parameters that differ")
    pairs = list(zip(first, one.parameters[0], strict=True))
    differs = max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs)
    values = list(zip(evaluated(script, one), evaluated(script, many), strict=True))
    is_close = bool(script.steps) or all(math.isclose(a, b, rel_tol=CLOSE) for a, b in values)
    if still and (differs > CLOSE or not is_close):
        raise SystemExit(f"{script.path} on {ranks} ranks trained something else: {differs:.1e}, {values}")
    return differs


def main(checkouts: Path, *repositories: str) -> None:
    """Run the scripts, on one rank first, which prepares what ranks would prepare at the same time."""
    for script in SCRIPTS:
        if repositories and script.repository not in repositories:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "run").mkdir()
            (folder / "sitecustomize.py").write_text(RECORDER)
            shutil.copytree((checkouts / script.repository / script.path).parent, folder / "code")
            script.data(folder)
            for still in (False, True):
                one = ran(script, folder, 1, still=still)
                for ranks in RANKS:
                    many = one if ranks == 1 else ran(script, folder, ranks, still=still)
                    differs = require_alike(script, one, many, still=still)
                    read = {key: "+".join(str(reads[key].total()) for reads in many.reads) for key in one.reads[0]}
                    how = "what is random stands still" if still else "as it is"
                    print(f"{script.repository}/{script.path} on {ranks} ranks, {how}: {len(many.lines)} lines")
                    print(f"  printed {evaluated(script, many)}, parameters differ by {differs:.1e}")
                    print(f"  read {read}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
