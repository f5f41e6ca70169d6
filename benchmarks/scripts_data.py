"""Makes the data of the scripts of the survey: small, random, and in the format that each of them reads.

A maker gets the folder above ``run``, in which the script runs, ``code``, a copy of its own folder, and ``checkout``.
"""

import io
import json
import math
import pickle
import random
import re
import shutil
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import torch
from PIL import Image


def mnist(folder: Path, train: int = 203, test: int = 47) -> None:
    """Write images to train on and to test on, in MNIST's format."""
    numbers, raw = random.Random(0), folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, n in (("train", train), ("t10k", test)):
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


def pictures(folder: Path, names: Sequence[str], size: tuple[int, int] = (64, 64), *, grey: bool = False) -> None:
    """Write pictures of noise by these names."""
    numbers = np.random.default_rng(len(names))
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shape = size[::-1] if grey else (*size[::-1], 3)
        Image.fromarray(numbers.integers(256, size=shape, dtype=np.uint8)).save(folder / name)


def photographs(at: Path) -> None:
    """Write 14 photographs to train on and 5 to test on, where BSDS300 has its own."""
    for kind, count in (("train", 14), ("test", 5)):
        names = [f"{kind}/{number}.jpg" for number in range(count)]
        pictures(at / "run" / "dataset" / "BSDS300" / "images", names, (270, 270))


def classes(folder: Path, train: int, test: int, size: int, parts: Sequence[str] = ("train", "val")) -> None:
    """Write pictures of two classes, each in its folder."""
    for part, count in zip(parts, (train, test), strict=True):
        pictures(folder / part, [f"{'ab'[number % 2]}/{number:03}.jpg" for number in range(count)], (size, size))


def resumed(at: Path) -> None:
    """Write pictures, and what examples/imagenet saves after its first epoch."""
    from torchvision.models import resnet18

    classes(at / "run" / "data", 14, 7, 64)
    torch.manual_seed(0)
    model = resnet18()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    told = {"epoch": 1, "arch": "resnet18", "state_dict": model.state_dict(), "best_acc1": torch.tensor(0.0)}
    told |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(told, at / "run" / "c.pth.tar")


def sentences(folder: Path, lines: int) -> None:
    """Write three texts of 50 words."""
    folder.mkdir(parents=True)
    numbers = random.Random(0)
    for name, count in (("train", lines), ("valid", lines // 4), ("test", lines // 4)):
        told = [" ".join(f"word{numbers.randrange(50)}" for _ in range(12)) for _ in range(count)]
        (folder / f"{name}.txt").write_text("\n".join(told) + "\n")


def waves(at: Path) -> None:
    """Write nine sine waves of 60 points."""
    starts = np.random.default_rng(0).integers(-80, 80, size=(9, 1))
    with (at / "run" / "traindata.pt").open("wb") as file:
        torch.save(np.sin((np.arange(60) + starts) / 20.0).astype("float64"), file)


def cora(folder: Path, nodes: int = 1500) -> None:
    """Write a ring of papers with 20 words each, in the format of Cora."""
    numbers = random.Random(0)
    folder.mkdir(parents=True)
    papers = [
        f"{node}\t" + "\t".join(str(numbers.randrange(2)) for _ in range(20)) + f"\tclass{node % 7}"
        for node in range(nodes)
    ]
    cites = [f"{node}\t{(node + step) % nodes}" for node in range(nodes) for step in (1, 7)]
    (folder / "cora.content").write_text("\n".join(papers) + "\n")
    (folder / "cora.cites").write_text("\n".join(cites) + "\n")


def small_images(folder: Path, each: int, kind: int = 10) -> None:
    """Write images in the format of CIFAR-10 or CIFAR-100: five files to train on, or one, and one to test on."""
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"] if kind == 10 else ["train", "test"]
    for name in names:
        images = numbers.integers(256, size=(each, 3072), dtype=np.uint8)
        labels = numbers.integers(kind, size=each).tolist()
        key = "labels" if kind == 10 else "fine_labels"
        (folder / name).write_bytes(pickle.dumps({"data": images, key: labels, "filenames": [""] * each}))
    for name, key in (("batches.meta", "label_names"), ("meta", "fine_label_names")):
        (folder / name).write_bytes(pickle.dumps({key: [str(number) for number in range(kind)]}))


def views(at: Path) -> None:
    """Write four small views of a scene, in the format of Blender's scenes of NeRF."""
    folder = at / "run" / "scene"
    for number, (name, count) in enumerate((("train", 3), ("val", 1), ("test", 1))):
        frames = []
        numbers = np.random.default_rng(number)
        (folder / name).mkdir(parents=True)
        for view in range(count):
            pixels = numbers.integers(256, size=(16, 16, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"r_{view}.png")
            turned = math.tau * view / 3
            matrix = np.array([[math.cos(turned), -math.sin(turned), 0, 0], [0, 0, 1, 0], [0, 1, 0, 4], [0, 0, 0, 1.0]])
            frames.append({"file_path": f"{name}/r_{view}", "transform_matrix": matrix.tolist()})
        (folder / f"transforms_{name}.json").write_text(json.dumps({"camera_angle_x": 0.69, "frames": frames}))


def masks(at: Path) -> None:
    """Write 20 pictures and their masks."""
    folder = at / "run" / "data"
    pictures(folder / "imgs", [f"{number}.png" for number in range(20)], (64, 48))
    (folder / "masks").mkdir()
    numbers = np.random.default_rng(0)
    for number in range(20):
        marked = np.zeros((48, 64), dtype=np.uint8)
        top, left = numbers.integers(30, size=2)
        marked[top : top + 15, left : left + 20] = 1
        Image.fromarray(marked).save(folder / "masks" / f"{number}.png")


def signs(at: Path) -> None:
    """Write pictures of hands, whose names begin with their class, and a configuration of two epochs."""
    for part, count in (("train", 27), ("val", 11), ("test", 5)):
        names = [f"{number % 6}_IMG_{number}.jpg" for number in range(count)]
        pictures(at / "run" / "data" / f"{part}_signs", names, (64, 64))
    told = {"learning_rate": 1e-3, "batch_size": 8, "num_epochs": 2, "dropout_rate": 0.8, "num_channels": 8}
    (at / "run" / "model").mkdir()
    (at / "run" / "model" / "params.json").write_text(json.dumps(told | {"save_summary_steps": 2, "num_workers": 0}))


def tagged(at: Path) -> None:
    """Write tagged sentences, their vocabulary and a configuration of two epochs."""
    folder, numbers = at / "run" / "data", random.Random(0)
    for part, count in (("train", 31), ("val", 9), ("test", 9)):
        (folder / part).mkdir(parents=True)
        lengths = [numbers.randrange(3, 9) for _ in range(count)]
        for name, kind, top in (("sentences", "word", 30), ("labels", "tag", 5)):
            lines = [" ".join(f"{kind}{numbers.randrange(top)}" for _ in range(length)) for length in lengths]
            (folder / part / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / "words.txt").write_text("\n".join([*(f"word{n}" for n in range(30)), "UNK", "<pad>"]))
    (folder / "tags.txt").write_text("\n".join(f"tag{n}" for n in range(5)))
    told = {"train_size": 31, "dev_size": 9, "test_size": 9, "vocab_size": 32, "number_of_tags": 5}
    told |= {"pad_word": "<pad>", "pad_tag": "tag0", "unk_word": "UNK"}
    (folder / "dataset_params.json").write_text(json.dumps(told))
    told = {"learning_rate": 1e-3, "batch_size": 6, "num_epochs": 2, "lstm_hidden_dim": 8, "embedding_dim": 8}
    (at / "run" / "model").mkdir()
    (at / "run" / "model" / "params.json").write_text(json.dumps(told | {"save_summary_steps": 2}))


def bert(folder: Path) -> None:
    """Write a small BERT with a vocabulary of 60 words."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder.mkdir(parents=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    told = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(told))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(told), **sizes)).save_pretrained(folder)


def paraphrases(at: Path) -> None:
    """Write pairs of sentences, in the format of GLUE's MRPC, and a small BERT by the name of a large one."""
    folder, numbers = at / "run" / "nyu-mll" / "glue", random.Random(0)
    folder.mkdir(parents=True)
    for part, count in (("train", 53), ("validation", 19), ("test", 7)):
        lines = []
        for number in range(count):
            pair = {f"sentence{n}": "".join(numbers.choices("abcdefgh ", k=numbers.randrange(9, 30))) for n in (1, 2)}
            lines.append(json.dumps(pair | {"label": numbers.randrange(2), "idx": number}))
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    parts = [f"  - split: {part}\n    path: {part}.jsonl" for part in ("train", "validation", "test")]
    told = ["---", "configs:", "- config_name: mrpc", "  data_files:", *parts, "---", ""]
    (folder / "README.md").write_text("\n".join(told))
    bert(at / "run" / "bert-base-cased")


def utterances(at: Path) -> None:
    """Write 23 utterances to train on and 7 to test on as Kaldi's features, and make the configuration small."""
    import kaldiio

    folder, numbers = at / "run" / "data", np.random.default_rng(0)
    folder.mkdir()
    (folder / "units").write_text("\n".join(f"ph{n}" for n in range(8)) + "\n")
    for part, count in (("train", 23), ("dev", 7)):
        (folder / part).mkdir()
        spoken = {f"u{n}": numbers.normal(size=(numbers.integers(40, 70), 81)).astype(np.float32) for n in range(count)}
        prefix = f"data/{part}/fbank"
        kaldiio.save_ark(str(at / "run" / f"{prefix}.ark"), spoken, scp=str(at / "run" / f"{prefix}.scp"))
        listed = (folder / part / "fbank.scp").read_text().replace(f"{at / 'run'}/", "")
        (folder / part / "fbank.scp").write_text(listed)
        texts = [f"{name} " + " ".join(f"ph{n}" for n in numbers.integers(8, size=4)) for name in spoken]
        (folder / part / "phn_text").write_text("\n".join(texts) + "\n")
    conf = (at / "checkout" / "timit" / "conf" / "ctc_config.yaml").read_text()
    for name, value in {"num_epoches": 2, "use_gpu": False, "rnn_hidden_size": 8, "rnn_layers": 2}.items():
        conf = re.sub(f"(?m)^{name}:.*", f"{name}: {value}", conf)
    (at / "run" / "c.yaml").write_text(re.sub("(?m)^verbose_step:.*", "verbose_step: 2", conf))


def boxed_words(at: Path) -> None:
    """Write pictures of words in two databases of LMDB to train on, and one to test on."""
    import lmdb

    numbers = np.random.default_rng(0)
    for name, count in (("train/MJ", 14), ("train/ST", 15), ("valid/x", 9)):
        folder = at / "run" / "words" / name
        folder.mkdir(parents=True)
        with lmdb.open(str(folder), map_size=1 << 24) as base, base.begin(write=True) as writing:
            for number in range(1, count + 1):
                kept = io.BytesIO()
                Image.fromarray(numbers.integers(256, size=(32, 80), dtype=np.uint8)).save(kept, "png")
                writing.put(f"image-{number:09}".encode(), kept.getvalue())
                writing.put(f"label-{number:09}".encode(), "".join(numbers.choice([*"abcd01"], size=4)).encode())
            writing.put(b"num-samples", str(count).encode())


def project(at: Path) -> None:
    """Lay the template's folders, and MNIST."""
    (at / ".project-root").touch()
    for name in ("configs", "src"):
        shutil.copytree(at / "checkout" / name, at / name)
    mnist(at / "data")


def boxes(at: Path) -> None:
    """Write pictures with boxes in YOLO's format, and make the configuration small."""
    folder, numbers = at / "run" / "data", random.Random(0)
    for part, count in (("train", 13), ("valid", 5)):
        names = [f"{part}{number}" for number in range(count)]
        pictures(folder / "images", [f"{name}.jpg" for name in names], (64, 64))
        (folder / "labels").mkdir(exist_ok=True)
        for name in names:
            box = [numbers.uniform(0.3, 0.7), numbers.uniform(0.3, 0.7), 0.3, 0.4]
            (folder / "labels" / f"{name}.txt").write_text(f"{numbers.randrange(3)} " + " ".join(map(str, box)) + "\n")
        (folder / f"{part}.txt").write_text("".join(f"data/images/{name}.jpg\n" for name in names))
    (folder / "classes.names").write_text("a\nb\nc\n")
    told = [f"classes={3}", "train=data/train.txt", "valid=data/valid.txt", "names=data/classes.names"]
    (at / "run" / "x.data").write_text("\n".join(told) + "\n")
    small = (at / "checkout" / "config" / "yolov3-tiny.cfg").read_text()
    for name, value in {"width": 64, "height": 64, "batch": 4, "subdivisions": 1}.items():
        small = re.sub(f"(?m)^{name}=.*", f"{name}={value}", small, count=1)
    small = re.sub("(?m)^classes=.*", "classes=3", small).replace("filters=255", "filters=24")
    small = re.sub(r"(?m)^filters=(128|256|512|1024)$", "filters=32", small)
    (at / "run" / "x.cfg").write_text(small)


def marked(at: Path) -> None:
    """Write pictures with boxes in the format of Pascal VOC."""
    numbers = random.Random(0)
    for part, count in (("train", 11), ("valid", 5)):
        folder = at / "run" / part
        pictures(folder, [f"{number}.jpg" for number in range(count)], (96, 96))
        for number in range(count):
            left, top = numbers.randrange(5, 40), numbers.randrange(5, 40)
            box = f"<xmin>{left}</xmin><ymin>{top}</ymin><xmax>{left + 40}</xmax><ymax>{top + 45}</ymax>"
            size = "<size><width>96</width><height>96</height><depth>3</depth></size>"
            thing = f"<object><name>{'ab'[number % 2]}</name><bndbox>{box}</bndbox></object>"
            told = f"<annotation><filename>{number}.jpg</filename>{size}{thing}</annotation>"
            (folder / f"{number}.xml").write_text(told)
    told = {f"{part.upper()}_DIR_{kind}": part for part in ("train", "valid") for kind in ("IMAGES", "LABELS")}
    told |= {"CLASSES": ["__background__", "a", "b"], "NC": 3, "SAVE_VALID_PREDICTION_IMAGES": False}
    (at / "run" / "x.yaml").write_text(json.dumps(told))


def scene(at: Path) -> None:
    """Write rays of three views, and a configuration of a small model."""
    numbers = torch.Generator().manual_seed(0)
    for part in ("train", "val"):
        (at / "run" / "rays" / part).mkdir(parents=True)
        for number in range(3 if part == "train" else 1):
            rays = torch.randn(2, 12, 12, 3, generator=numbers, dtype=torch.float64).to(torch.get_default_dtype())
            told = {"height": 12, "width": 12, "focal_length": 9.0, "ray_bundle": rays, "ray_origins": rays[0]}
            told |= {"ray_directions": rays[1], "target": torch.rand(12, 12, 3, generator=numbers)}
            torch.save(told, at / "run" / "rays" / part / f"{number}.data")
    told = (at / "checkout" / "config" / "lego.yml").read_text()
    for name, value in {
        "train_iters": 9,
        "validate_every": 4,
        "save_every": 4,
        "print_every": 2,
        "cachedir": "rays",
        "num_layers": 3,
        "hidden_size": 16,
        "num_random_rays": 50,
        "chunksize": 300,
        "num_coarse": 6,
        "num_fine": 6,
    }.items():
        told = re.sub(f"(?m)^( *{name}:).*", f"\\1 {value}", told)
    (at / "run" / "c.yml").write_text(told)


def clothes(at: Path) -> None:
    """Write 64 images to train on and 20 to test on, in the format of FashionMNIST."""
    mnist(at / "run", 64, 20)
    (at / "run" / "MNIST").rename(at / "run" / "FashionMNIST")


def beside_mnist(at: Path) -> None:
    """Write MNIST where the scripts of PyTorch-GAN look for it."""
    mnist(at.parent / "data" / "mnist")
