"""Run scripts that others wrote as one process on 1, 2 and 3 ranks, unedited, and compare what the ranks do.

``python benchmarks/scripts.py FOLDER`` takes checkouts from FOLDER, each in a folder of its repository's name; further
arguments choose some. Each script gets small data of ours. Its parameters at the end are recorded from outside, in
every process.

Each runs twice. The first time it is as it is, and ``--check`` says of it what it finds. The second time what ranks
cannot share with one process stands still: dropout passes all, batch normalisation takes its running numbers, noise is
0, transforms of a sample draw from the sample's own seed, and all is in double precision. Then all ranks must end with
the parameters of one, and print its evaluation.
"""

import json
import math
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import torch
from PIL import Image

RANKS = (1, 2, 3)
LIMIT_S = 900.0
CLOSE = 1e-7  # of the largest parameter, in double precision
GIT = shutil.ignore_patterns(".git")
ALIKE = 1e-3  # as it is, in single precision, if --check says that ranks do the same

# Python imports it as it starts. What starts the ranks, which has no rank, is let be.
RECORDER = """
import atexit, os, pathlib
if "RECORD_TO" in os.environ and "RANK" in os.environ:
    import random
    import numpy
    import torch
    from torch.nn import functional
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils._pytree import tree_map
    from torch.utils.data._utils.fetch import _MapDatasetFetcher as Fetcher
    folder, still, optimizers = pathlib.Path(os.environ["RECORD_TO"]), os.environ["STILL"] == "True", {}
    rank = os.environ["RANK"]  # which the script does not see
    steps, write = [0], torch.save
    fetch, normalise, attend = Fetcher.fetch, functional.batch_norm, functional.scaled_dot_product_attention

    def fetching(self, index):
        if not isinstance(index, (list, tuple)):
            return fetch(self, index)
        samples = [sample(self.dataset, int(one)) for one in index]
        return tree_map(doubled, self.collate_fn(tree_map(doubled, samples)))

    def sample(dataset, index):
        kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(index)
        if hasattr(dataset, "set_random_state"):  # as MONAI's have it
            dataset.set_random_state(seed=index)
        try:
            return dataset[index]
        finally:
            for restore, state in zip((random.setstate, numpy.random.set_state, torch.set_rng_state), kept):
                restore(state)

    def doubled(value):
        if hasattr(value, "edge_index"):  # a graph of torch_geometric
            return value.apply(doubled)
        is_single = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.double() if is_single else value

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
        write([each.detach() for group in groups for each in group], folder / f"{rank}.pt")

    register_optimizer_step_post_hook(count)
    if os.environ["STEPS"] == "0":
        atexit.register(save)
    if still:
        torch.set_default_dtype(torch.float64)
        functional.dropout = functional.dropout2d = lambda input, *args, **options: input
        functional.batch_norm, functional.scaled_dot_product_attention = steady, attending
        torch.randn_like, Fetcher.fetch = torch.zeros_like, fetching
        torch.Tensor.float, torch.nn.Module.float = torch.Tensor.double, torch.nn.Module.double
"""
# What some scripts need to run at all: files of ours have not the checksums of CIFAR-10's, and NumPy 2 has no Inf.
ANY_CHECKSUM = """
import torchvision.datasets.cifar
torchvision.datasets.cifar.check_integrity = lambda *args, **options: True
"""
OLD_NUMPY = """
import numpy
numpy.Inf = numpy.inf
"""


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        repository: The folder of its checkout.
        path: Where it is there.
        evaluation: Finds the numbers of its evaluations in what it prints; nothing if it prints none.
        data: Makes its data, in the folder above the one that it runs in, which has a copy of its own folder beside it.
        arguments: Its own.
        shim: What Python runs before it.
        steps: Compare the parameters after so many steps of the optimizer, and no evaluation: from then on, its
            training makes much of a rounding, on one rank, too. Default: compare at the end.
    """

    repository: str
    path: str
    evaluation: str = "$^"
    data: Callable[[Path], object] = lambda folder: None
    arguments: Sequence[str] = ()
    shim: str = ""
    steps: int = 0


@dataclass
class Ran:
    """What a script did on some ranks: what it printed, and each one's last parameters."""

    lines: list[str]
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


def copied(*names: str) -> Callable[[Path], object]:
    """Return what copies files or folders of the script's own folder to where it runs."""

    def copy(at: Path) -> None:
        for name in names:
            source, target = at / "code" / name, at / "run" / name
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)

    return copy


def beside(at: Path) -> None:
    """Write MNIST two folders above the one that the script runs in."""
    mnist(at.parent / "data")


def fashion(at: Path) -> None:
    """Write MNIST by the name of another one."""
    mnist(at / "datasets")
    (at / "datasets" / "MNIST").rename(at / "datasets" / "FashionMNIST")


def template(at: Path) -> None:
    """Write a configuration of two epochs."""
    told = json.loads((at / "code" / "config.json").read_text())
    told["trainer"] |= {"epochs": 2, "tensorboard": False}
    (at / "run" / "c.json").write_text(json.dumps(told))
    copied("logger")(at)
    mnist(at / "run" / "data")


def tokens(at: Path) -> None:
    """Write 5000 tokens twice, and have the script run beside the files that it executes."""
    numbers = torch.randint(50, (5000,), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    (at / "run" / "data" / "x").mkdir(parents=True)
    for name in ("train", "val"):
        (at / "run" / "data" / "x" / f"{name}.bin").write_bytes(numbers.numpy().tobytes())
    copied("configurator.py", "model.py")(at)


def cifar(at: Path) -> None:
    """Write six files of 17 images each, in CIFAR-10's format."""
    folder = at / "run" / "datasets" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        images = numbers.integers(256, size=(17, 3072), dtype=np.uint8)
        labels = numbers.integers(10, size=17).tolist()
        (folder / name).write_bytes(pickle.dumps({"data": images, "labels": labels}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [*"0123456789"]}))


def patches(at: Path) -> None:
    """Write 70 patches to train on and five images to test on, each beside a noisy copy."""
    numbers = np.random.default_rng(0)

    def pair(*shape: int) -> tuple[np.ndarray, np.ndarray]:
        sharp = numbers.integers(256, size=shape).astype(np.float32)
        return (sharp + numbers.normal(scale=20, size=shape)).clip(0, 255).astype(np.float32), sharp

    with h5py.File(at / "run" / "train.h5", "w") as file:
        file["lr"], file["hr"] = pair(70, 33, 33)
    with h5py.File(at / "run" / "eval.h5", "w") as file:
        for number in range(5):
            file[f"lr/{number}"], file[f"hr/{number}"] = pair(40, 36)


def hours(at: Path) -> None:
    """Write 400 hours of seven noisy waves."""
    numbers, place = np.random.default_rng(0), np.arange(400)
    table: dict[str, object] = {"date": pd.date_range("2016-07-01", periods=400, freq="h").strftime("%F %T")}
    for name in ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"):
        table[name] = np.sin(place / 24 * math.tau + numbers.random() * 6) + numbers.normal(scale=0.3, size=400)
    pd.DataFrame(table).to_csv(at / "run" / "x.csv", index=False)


def written_words(at: Path) -> None:
    """Write 43 images to train on and 11 to test on, in Synth90k's format, and make its configuration small."""
    root = at / "run" / "data" / "mnt" / "ramdisk" / "max" / "90kDICT32px"
    (at / "run" / "checkpoints").mkdir()
    letters, numbers = random.Random(0), np.random.default_rng(0)
    for kind, count in (("train", 43), ("val", 11)):
        (root / kind).mkdir(parents=True)
        for number in range(count):
            pixels = numbers.integers(256, size=(31, 60 + number % 30), dtype=np.uint8)
            Image.fromarray(pixels).save(root / kind / f"{number}.jpg")
        told = [f"./{kind}/{number}.jpg {number % 20}\n" for number in range(count)]
        (root / f"annotation_{kind}.txt").write_text("".join(told))
    lexicon = ["".join(letters.choices("abcdefghij0123", k=letters.randrange(2, 7))) for _ in range(20)]
    (root / "lexicon.txt").write_text("\n".join(lexicon) + "\n")
    small = "train_config |= dict(epochs=2, train_batch_size=8, show_interval=2, valid_interval=3, save_interval=6)\n"
    with (at / "code" / "config.py").open("a") as file:
        file.write(f"{small}train_config |= dict(cpu_workers=0, rnn_hidden=16)\n")


SMALL = ("--max-steps", "501", "--n-layer", "1", "--n-embd", "8", "--n-embd2", "8", "--type", "bow")
GPT = ("--dataset=x", "--device=cpu", "--compile=False", "--max_iters=4", "--n_layer=2", "--n_head=2", "--n_embd=16")
GPT += ("--block_size=16", "--batch_size=4", "--eval_iters=2", "--gradient_accumulation_steps=2", "--dtype=float32")
CONTRASTS = ("-dataset-name", "cifar10", "-j", "0", "--epochs", "2", "-b", "16", "--disable-cuda", "--out_dim", "16")
SHARPER = ("--train-file", "train.h5", "--eval-file", "eval.h5", "--outputs-dir", "out", "--num-epochs", "3")
SHARPER += ("--num-workers", "0")
FORECAST = ("--is_training", "1", "--model_id", "x", "--model", "DLinear", "--data", "custom", "--root_path", ".")
FORECAST += ("--data_path", "x.csv", "--features", "M", "--seq_len", "24", "--label_len", "12", "--pred_len", "8")
FORECAST += ("--enc_in", "7", "--train_epochs", "3", "--itr", "1", "--num_workers", "0", "--learning_rate", "0.005")
TUTORIAL = "tutorials/02-intermediate"
AVERAGE = r"Average loss: ([\d.]+), Accuracy: (\d+)"
ACCURACY = r"Accuracy of the \D*[\d,]*\D*: ([\d.]+)"
SCRIPTS = [
    Script(
        "examples",
        "mnist/main.py",
        r"Average loss: ([\d.]+), Accuracy: (\d+)",
        lambda at: mnist(at / "data"),
        ("--epochs", "2", "--no-accel"),
    ),
    Script("examples", "mnist_rnn/main.py", AVERAGE, lambda at: mnist(at / "data"), ("--epochs", "2")),
    Script(
        "examples",
        "vae/main.py",
        r"Test set loss: ([\d.]+)",
        lambda at: [mnist(at / "data"), (at / "run" / "results").mkdir()],
        ("--epochs", "2", "--no-accel", "--batch-size", "32"),
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
    Script("tutorials", "2d_segmentation/torch/unet_training_array.py", r"current mean dice: (\d\.\d+)"),
    # It draws with replacement, 10,000,000,000 samples in an epoch.
    Script(
        "makemore",
        "makemore.py",
        r"train loss: ([\d.]+) test loss: ([\d.]+)",
        names,
        ("-i", "names.txt", "--num-workers", "0", *SMALL),
    ),
    Script("PyTorchZeroToAll", "08_2_dataset_loade_logistic.py", data=copied("data")),
    Script("PyTorchZeroToAll", "10_1_cnn_mnist.py", AVERAGE, lambda at: mnist(at / "run" / "data")),
    Script("pytorch-tutorial", f"{TUTORIAL}/convolutional_neural_network/main.py", ACCURACY, beside),
    Script("pytorch-tutorial", f"{TUTORIAL}/bidirectional_recurrent_neural_network/main.py", ACCURACY, beside),
    Script("pytorchTutorial", "13_feedforward.py", ACCURACY, lambda at: mnist(at / "run" / "data")),
    Script("PyTorch-Tutorial", "tutorial-contents/306_optimizer.py"),
    Script("pytorch-template", "train.py", r"val_loss +: ([\d.]+)", template, ("-c", "c.json")),
    Script("pytorch-beginner", "03-Neural Network/neural_network.py", r"Test Loss: ([\d.]+)", fashion),
    Script("pytorch_misc", "mnist_autoencoder.py", data=lambda at: mnist(at / "run" / "data")),
    Script(
        "minGPT",
        "projects/adder/adder.py",
        r"test final score: (\d+)",
        lambda at: shutil.copytree(at / "checkout" / "mingpt", at / "code" / "mingpt"),
        ("--trainer.max_iters=30", "--model.model_type=gpt-nano", "--trainer.num_workers=0"),
    ),
    Script(
        "machine-learning-book",
        "ch13/ch13_part4_ignite.py",
        r"Avg Accuracy: ([\d.]+) Avg Loss: ([\d.]+)",
        lambda at: [shutil.copy(at / "checkout" / "python_environment_check.py", at / "code"), mnist(at / "run")],
    ),
    Script("skorch", "examples/cli/train.py", arguments=("net", "--batch_size", "16")),
    Script(
        "TCN",
        "TCN/mnist_pixel/pmnist_test.py",
        AVERAGE,
        lambda at: [
            shutil.copytree(at / "checkout" / "TCN", at / "code" / "TCN"),
            mnist(at / "run" / "data" / "mnist"),
        ],
        ("--epochs", "1", "--cuda", "--levels", "2", "--nhid", "4"),
    ),
    Script("nanoGPT", "train.py", data=tokens, arguments=GPT),
    Script("SimCLR", "run.py", data=cifar, arguments=CONTRASTS, shim=ANY_CHECKSUM),
    Script("SRCNN-pytorch", "train.py", r"psnr: ([\d.]+)", patches, SHARPER),
    Script("LTSF-Linear", "run_longExp.py", r"Vali Loss: ([\d.]+) Test Loss: ([\d.]+)", hours, FORECAST, OLD_NUMPY),
    Script("crnn-pytorch", "src/train.py", r"valid_evaluation: loss=([\d.]+), acc=([\d.]+)", written_words),
]


def started(script: Script, folder: Path, *options: str, **own: str) -> subprocess.CompletedProcess[str]:
    """Run a script by the command, with some options, and return what it printed and how it ended."""
    own |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "MPLBACKEND": "agg", "HOME": str(folder / "home")}
    own["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    target = str(folder / "code" / Path(script.path).name)
    command = [sys.executable, "-W", "ignore", "-m", "ddp_patch", "run", *options, "--seed", "0", target]
    return subprocess.run(  # noqa: S603 - what the list above names
        [*command, *script.arguments],
        cwd=folder / "run",
        env={**os.environ, **own},
        check=False,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
    )


def ran(script: Script, folder: Path, ranks: int, *, still: bool) -> Ran:
    """Run a script on some ranks, and return what was recorded."""
    record = folder / f"record-{ranks}-{still}"
    record.mkdir()
    own = {"RECORD_TO": str(record), "STILL": str(still), "STEPS": str(script.steps)}
    done = started(script, folder, "-n", str(ranks), **own)
    if done.returncode:
        raise SystemExit(f"{script.path} on {ranks} ranks ended with {done.returncode}: {done.stderr[-2000:]}")
    return Ran(done.stdout.splitlines(), [torch.load(record / f"{rank}.pt") for rank in range(ranks)])


def evaluated(script: Script, told: Ran) -> list[float]:
    """Return the numbers of the evaluations that a script has printed."""
    found = re.finditer(script.evaluation, "\n".join(told.lines))
    return [float(value) for match in found for value in match.groups()]


def require_alike(script: Script, one: Ran, many: Ran, *, still: bool) -> float:
    """Hold the ranks to what one does; return the largest difference of a parameter, as a part of the largest one."""
    ranks = len(many.parameters)
    if still and len(one.lines) != len(many.lines):
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


def checked(script: Script, folder: Path, differs: float) -> str:
    """Return what ``--check`` says of two ranks; it may not say that they do the same if their parameters differ."""
    done = started(script, folder, "--check", "--steps", "6", "-n", "2")
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    begins = max(number for number, line in enumerate(lines) if not line.startswith(" "))  # the others go on with it
    verdict = " ".join(line.strip() for line in lines[begins:])
    if verdict.startswith("The same.") and differs > ALIKE:
        raise SystemExit(f"{script.path}: --check says {verdict!r}, and the parameters differ by {differs:.1e}")
    return verdict


def tried(script: Script, folder: Path) -> list[str]:
    """Return the script's row: differences where all stands still, as it is on two ranks, and what ``--check`` says.

    One rank runs first, which prepares what ranks would prepare at the same time.
    """
    differs = []
    for still, several in ((True, RANKS[1:]), (False, RANKS[1:2])):
        for made in [*folder.rglob("processed")]:  # in double precision, by torch_geometric
            shutil.rmtree(made)
        one = ran(script, folder, 1, still=still)
        differs += [
            require_alike(script, one, ran(script, folder, ranks, still=still), still=still) for ranks in several
        ]
    *quiet, as_it_is = differs
    return [", ".join(f"{each:.0e}" for each in quiet), f"{as_it_is:.0e}", checked(script, folder, as_it_is)]


def main(checkouts: Path, *chosen: str) -> None:
    """Run the scripts, and print a table."""
    print("| script | 2 and 3 ranks | 2 ranks, as it is | `--check -n 2` |\n| --- | --- | --- | --- |")
    for script in SCRIPTS:
        if chosen and not any(one in f"{script.repository}/{script.path}" for one in chosen):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "x"
            (folder / "run").mkdir(parents=True)
            (folder / "home").mkdir()
            (folder / "sitecustomize.py").write_text(RECORDER + script.shim)
            (folder / "checkout").symlink_to(checkouts / script.repository)
            shutil.copytree((checkouts / script.repository / script.path).parent, folder / "code", ignore=GIT)
            script.data(folder)
            print(f"| {script.repository}: `{script.path}` |", " | ".join(tried(script, folder)), "|", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
