"""Makes the data of the scripts of the survey: small, random, and in the format that each of them reads.

A maker gets the folder above ``run``, in which the script runs, ``code``, a copy of its own folder, and ``checkout``.
"""

import json
import math
import pickle
import random
import shutil
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import torch
from PIL import Image


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
