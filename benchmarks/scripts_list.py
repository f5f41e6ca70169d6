"""Lists the scripts of the survey: where each is, its arguments and its data."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import scripts_data as data
from scripts_data import copied

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
        data: Makes its data, in the folder above the one that it runs in, which has a copy of its own folder beside it.
        arguments: Its own.
        shim: What Python runs before it.
        stop: End it after so many steps of an optimizer. Default: run it to its end.
        paths: Folders of the checkout that Python imports from.
    """

    repository: str
    path: str
    data: Callable[[Path], object] = lambda folder: None
    arguments: Sequence[str] = ()
    shim: str = ""
    stop: int = 0
    paths: Sequence[str] = ()


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
SCRIPTS = [
    Script("examples", "mnist/main.py", lambda at: data.mnist(at / "data"), ("--epochs", "2", "--no-accel")),
    Script("examples", "mnist_rnn/main.py", lambda at: data.mnist(at / "data"), ("--epochs", "2")),
    Script(
        "examples",
        "vae/main.py",
        lambda at: [data.mnist(at / "data"), (at / "run" / "results").mkdir()],
        ("--epochs", "2", "--no-accel", "--batch-size", "32"),
    ),
    Script("ignite", "examples/mnist/mnist.py", lambda at: data.mnist(at / "run"), ("--epochs", "2")),
    Script("pytorch_geometric", "examples/mutag_gin.py", data.mutag, ("--epochs", "2")),
    Script("pytorch-lightning", "examples/pytorch/basics/transformer.py", data.words, stop=12),
    Script("tutorials", "2d_segmentation/torch/unet_training_array.py"),
    # It draws with replacement, 10,000,000,000 samples in an epoch.
    Script("makemore", "makemore.py", data.names, ("-i", "names.txt", "--num-workers", "0", *SMALL)),
    Script("PyTorchZeroToAll", "08_2_dataset_loade_logistic.py", data=copied("data")),
    Script("PyTorchZeroToAll", "10_1_cnn_mnist.py", lambda at: data.mnist(at / "run" / "data")),
    Script("pytorch-tutorial", f"{TUTORIAL}/convolutional_neural_network/main.py", data.beside),
    Script("pytorch-tutorial", f"{TUTORIAL}/bidirectional_recurrent_neural_network/main.py", data.beside),
    Script("pytorchTutorial", "13_feedforward.py", lambda at: data.mnist(at / "run" / "data")),
    Script("PyTorch-Tutorial", "tutorial-contents/306_optimizer.py"),
    Script("pytorch-template", "train.py", data.template, ("-c", "c.json")),
    Script("pytorch-beginner", "03-Neural Network/neural_network.py", data.fashion),
    Script("pytorch_misc", "mnist_autoencoder.py", data=lambda at: data.mnist(at / "run" / "data")),
    Script(
        "minGPT",
        "projects/adder/adder.py",
        lambda at: shutil.copytree(at / "checkout" / "mingpt", at / "code" / "mingpt"),
        ("--trainer.max_iters=30", "--model.model_type=gpt-nano", "--trainer.num_workers=0"),
    ),
    Script(
        "machine-learning-book",
        "ch13/ch13_part4_ignite.py",
        lambda at: [shutil.copy(at / "checkout" / "python_environment_check.py", at / "code"), data.mnist(at / "run")],
    ),
    Script("skorch", "examples/cli/train.py", arguments=("net", "--batch_size", "16")),
    Script(
        "TCN",
        "TCN/mnist_pixel/pmnist_test.py",
        lambda at: [
            shutil.copytree(at / "checkout" / "TCN", at / "code" / "TCN"),
            data.mnist(at / "run" / "data" / "mnist"),
        ],
        ("--epochs", "1", "--cuda", "--levels", "2", "--nhid", "4"),
    ),
    Script("nanoGPT", "train.py", data=data.tokens, arguments=GPT),
    Script("SimCLR", "run.py", data=data.cifar, arguments=CONTRASTS, shim=ANY_CHECKSUM),
    Script("SRCNN-pytorch", "train.py", data.patches, SHARPER),
    Script("LTSF-Linear", "run_longExp.py", data.hours, FORECAST, OLD_NUMPY),
    Script("crnn-pytorch", "src/train.py", data.written_words),
]
