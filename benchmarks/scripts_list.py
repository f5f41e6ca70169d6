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
numpy.Inf, numpy.bool, numpy.sctypes = numpy.inf, numpy.bool_, {"int": [], "uint": [], "float": []}
"""
# A script that names a GPU takes the processor.
ON_CPU = """
import torch
def _at(place):
    is_gpu = str(place).startswith("cuda") and isinstance(place, (str, torch.device))
    return "cpu" if is_gpu else place
def _moving(move):
    def moved(self, *places, **options):
        return move(self, *map(_at, places), **{name: _at(value) for name, value in options.items()})
    return moved
torch.Tensor.to, torch.nn.Module.to = _moving(torch.Tensor.to), _moving(torch.nn.Module.to)
torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *places, **options: self
torch.set_default_tensor_type = lambda kind: None
torch.cuda.memory_summary = lambda: ""
"""
NO_SEARCHSORTED = """
import sys, torch, types
sys.modules["torchsearchsorted"] = types.SimpleNamespace(
    searchsorted=lambda sorted, values, side="left": torch.searchsorted(sorted, values, right=side == "right")
)
"""
NO_VISDOM = """
import sys, types
sys.modules["visdom"] = types.SimpleNamespace(Visdom=lambda **options: types.SimpleNamespace(line=lambda **told: "x"))
"""
OLD_TORCH = """
import itertools, torch._utils
torch._utils._accumulate = itertools.accumulate
"""
# Metrics come from a hub.
NO_EVALUATE = """
import sys, types
class _Accuracy:
    def __init__(self):
        self.pairs = []
    def add_batch(self, predictions, references):
        self.pairs += zip(predictions.tolist(), references.tolist())
    def compute(self, predictions=(), references=()):
        pairs, self.pairs = [*self.pairs, *zip(list(predictions), list(references))], []
        return {"accuracy": sum(int(a == b) for a, b in pairs) / len(pairs)}
sys.modules["evaluate"] = types.SimpleNamespace(load=lambda *names: _Accuracy())
"""
# Files of arrays were loaded without being asked for.
OLD_LOAD = """
import os
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
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
        single: Its data is in single precision, so that it cannot run in double.
    """

    repository: str
    path: str
    data: Callable[[Path], object] = lambda folder: None
    arguments: Sequence[str] = ()
    shim: str = ""
    stop: int = 0
    paths: Sequence[str] = ()
    single: bool = False


SMALL = ("--max-steps", "501", "--n-layer", "1", "--n-embd", "8", "--n-embd2", "8", "--type", "bow")
GPT = ("--dataset=x", "--device=cpu", "--compile=False", "--max_iters=4", "--n_layer=2", "--n_head=2", "--n_embd=16")
GPT += ("--block_size=16", "--batch_size=4", "--eval_iters=2", "--gradient_accumulation_steps=2", "--dtype=float32")
CONTRASTS = ("-dataset-name", "cifar10", "-j", "0", "--epochs", "2", "-b", "16", "--disable-cuda", "--out_dim", "16")
SHARPER = ("--train-file", "train.h5", "--eval-file", "eval.h5", "--outputs-dir", "out", "--num-epochs", "3")
SHARPER += ("--num-workers", "0")
FORECAST = ("--is_training", "1", "--model_id", "x", "--model", "DLinear", "--data", "custom", "--root_path", ".")
FORECAST += ("--data_path", "x.csv", "--features", "M", "--seq_len", "24", "--label_len", "12", "--pred_len", "8")
FORECAST += ("--enc_in", "7", "--train_epochs", "3", "--itr", "1", "--num_workers", "0", "--learning_rate", "0.005")
LANGUAGE = ("--data", "data/w", "--emsize", "16", "--nhid", "16", "--epochs", "2", "--batch_size", "6", "--bptt", "9")
LANGUAGE += ("--log-interval", "5", "--dropout", "0")
RAYS = ("--expname", "x", "--basedir", "logs", "--datadir", "scene", "--dataset_type", "blender", "--no_batching")
RAYS += ("--N_samples", "6", "--N_importance", "6", "--N_rand", "50", "--netdepth", "2", "--netwidth", "16")
RAYS += ("--netdepth_fine", "2", "--netwidth_fine", "16", "--chunk", "200", "--netchunk", "700", "--testskip", "1")
RAYS += ("--i_print", "2", "--i_weights", "4", "--use_viewdirs", "--white_bkgd")
BOXES = ("--model", "x.cfg", "--data", "x.data", "--epochs", "1", "--n_cpu", "0", "--seed", "1")
FASTER = ("--data", "x.yaml", "--model", "fasterrcnn_mini_darknet_nano_head", "--device", "cpu", "--epochs", "1")
FASTER += ("--batch", "4", "--imgsz", "96", "--workers", "0", "--disable-wandb", "--name", "x")
DEEP_Q = ("--total-timesteps", "160", "--learning-starts", "40", "--batch-size", "16", "--train-frequency", "4")
DEEP_Q += ("--no-cuda", "--buffer-size", "200", "--target-network-frequency", "20")
GAN = ("--n_epochs", "1", "--batch_size", "16", "--sample_interval", "5")
INFORMER = ("--model", "informer", "--data", "custom", "--root_path", ".", "--data_path", "x.csv", "--seq_len", "24")
INFORMER += ("--label_len", "12", "--pred_len", "8", "--train_epochs", "1", "--itr", "1", "--d_model", "16")
INFORMER += ("--n_heads", "2", "--d_ff", "16", "--attn", "full")
WORDS = ("--train_data", "words/train", "--valid_data", "words/valid", "--batch_size", "8", "--num_iter", "5")
WORDS += ("--valInterval", "3", "--workers", "0", "--Transformation", "None", "--FeatureExtraction", "VGG")
WORDS += ("--SequenceModeling", "BiLSTM", "--Prediction", "CTC", "--output_channel", "32", "--hidden_size", "16")
FAKES = ("--dataset", "fake", "--batchSize", "8", "--imageSize", "64", "--ngf", "8", "--ndf", "8")
FAKES += ("--workers", "0", "--manualSeed", "1", "--niter", "1")
QUICK = ("-c", "../code/configs/simsiam_cifar_quick.yaml", "--debug", "--data_dir", "data", "--log_dir")
QUICK += ("log", "--ckpt_dir", "ckpt", "--hide_progress")
TEMPLATE = ("trainer=cpu", "trainer.max_epochs=1", "trainer.min_epochs=1")
TEMPLATE += ("data.train_val_test_split=[150,50,50]", "data.batch_size=32", "callbacks=none")
TEMPLATE += ("extras.print_config=False", "test=False")
TIMM = ("--data-dir", "data", "--model", "resnet10t", "--img-size", "32", "-b", "5", "--epochs", "1")
TIMM += ("--workers", "0", "--device", "cpu", "--model-ema", "--num-classes", "2", "--cooldown-epochs", "0")
TIMM += ("--warmup-epochs", "0")
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
    Script(
        "SimCLR",
        "run.py",
        lambda at: data.small_images(at / "run" / "datasets" / "cifar-10-batches-py", 17),
        CONTRASTS,
        ANY_CHECKSUM,
    ),
    Script("SRCNN-pytorch", "train.py", data.patches, SHARPER),
    Script("LTSF-Linear", "run_longExp.py", data.hours, FORECAST, OLD_NUMPY),
    Script("crnn-pytorch", "src/train.py", data.written_words),
    # Others than loops over a classifier's batches: CTC, graphs, diffusion, views, rays, boxes, folds, searches.
    Script(
        "examples",
        "super_resolution/main.py",
        data.photographs,
        ("--upscale_factor", "3", "--batchSize", "4", "--testBatchSize", "2", "--threads", "0"),
    ),
    Script(
        "examples",
        "siamese_network/main.py",
        lambda at: data.mnist(at / "data"),
        ("--epochs", "1", "--batch-size", "32", "--no-accel"),
    ),
    Script(
        "examples", "word_language_model/main.py", lambda at: data.sentences(at / "run" / "data" / "w", 120), LANGUAGE
    ),
    Script("examples", "dcgan/main.py", arguments=FAKES, stop=24),
    Script(
        "examples",
        "imagenet/main.py",
        data.resumed,
        (
            "data",
            "-a",
            "resnet18",
            "-b",
            "5",
            "--epochs",
            "2",
            "-j",
            "0",
            "--no-accel",
            "--resume",
            "c.pth.tar",
            "-p",
            "1",
        ),
    ),
    Script(
        "examples",
        "mnist_forward_forward/main.py",
        lambda at: data.mnist(at / "run" / "data"),
        ("--epochs", "3", "--train_size", "60", "--test_size", "47", "--log-interval", "1", "--no_accel"),
    ),
    Script("examples", "time_sequence_prediction/train.py", data.waves, ("--steps", "2"), OLD_LOAD),
    Script(
        "examples",
        "mnist_hogwild/main.py",
        lambda at: data.mnist(at / "data"),
        ("--epochs", "1", "--num-processes", "2", "--batch-size", "16"),
    ),
    Script("examples", "reinforcement_learning/actor_critic.py", stop=4, arguments=("--log-interval", "1")),
    Script(
        "pygcn",
        "pygcn/train.py",
        lambda at: data.cora(at / "data" / "cora"),
        ("--epochs", "8"),
        paths=(".",),
        single=True,
    ),
    Script(
        "pyGAT", "train.py", lambda at: data.cora(at / "run" / "data" / "cora"), ("--epochs", "2", "--nb_heads", "2")
    ),
    Script(
        "tiny-diffusion",
        "ddpm.py",
        arguments=("--dataset", "circle", "--num_epochs", "1", "--eval_batch_size", "31", "--train_batch_size", "200"),
    ),
    *(
        Script(
            "lightly",
            f"examples/pytorch/{name}.py",
            lambda at: data.small_images(at / "run" / "datasets" / "cifar10" / "cifar-10-batches-py", 52),
            shim=ANY_CHECKSUM,
            stop=2,
        )
        for name in ("byol", "simsiam", "vicreg")
    ),
    Script(
        "SimSiam",
        "main.py",
        lambda at: [
            data.small_images(at / "run" / "data" / "cifar-10-batches-py", 17),
            (at / "run" / "log").mkdir(),
            (at / "run" / "ckpt").mkdir(),
        ],
        QUICK,
        ANY_CHECKSUM,
    ),
    Script("nerf-pytorch", "run_nerf.py", data.views, RAYS, ON_CPU, stop=9),
    Script("krrish94-nerf-pytorch", "train_nerf.py", data.scene, ("--config", "c.yml"), NO_SEARCHSORTED, single=True),
    Script("PyTorch-YOLOv3", "pytorchyolo/train.py", data.boxes, BOXES, OLD_NUMPY, paths=(".",)),
    Script("fasterrcnn-pytorch-training-pipeline", "train.py", data.marked, FASTER),
    Script("Pytorch-UNet", "train.py", data.masks, ("-e", "1", "-b", "4", "-s", "0.5", "-v", "20")),
    Script("accelerate", "examples/nlp_example.py", data.paraphrases, ("--cpu",), NO_EVALUATE, single=True),
    Script(
        "accelerate", "examples/by_feature/cross_validation.py", data.paraphrases, ("--cpu",), NO_EVALUATE, single=True
    ),
    Script("optuna-examples", "pytorch/pytorch_simple.py", data.clothes, stop=60),
    Script(
        "pytorch-cifar100",
        "lr_finder.py",
        lambda at: data.small_images(at / "run" / "data" / "cifar-100-python", 43, 100),
        ("-net", "squeezenet", "-b", "8", "-num_iter", "17"),
        ANY_CHECKSUM + ON_CPU,
    ),
    Script(
        "pytorch-cifar100",
        "train.py",
        lambda at: data.small_images(at / "run" / "data" / "cifar-100-python", 43, 100),
        ("-net", "squeezenet", "-b", "8"),
        ANY_CHECKSUM + ON_CPU,
        stop=14,
    ),
    Script("lightning-hydra-template", "src/train.py", data.project, TEMPLATE),
    Script("cleanrl", "cleanrl/dqn.py", arguments=DEEP_Q, paths=(".",), single=True),
    Script(
        "cleanrl",
        "cleanrl/ppo.py",
        arguments=("--total-timesteps", "300", "--num-envs", "2", "--num-steps", "50", "--no-cuda"),
    ),
    Script(
        "pytorch-center-loss",
        "main.py",
        lambda at: data.mnist(at / "run" / "data" / "mnist"),
        (
            "--use-cpu",
            "--max-epoch",
            "2",
            "--eval-freq",
            "1",
            "--workers",
            "0",
            "--batch-size",
            "32",
            "--print-freq",
            "2",
        ),
    ),
    Script(
        "cs230-code-examples", "pytorch/vision/train.py", data.signs, ("--data_dir", "data", "--model_dir", "model")
    ),
    Script("cs230-code-examples", "pytorch/nlp/train.py", data.tagged, ("--data_dir", "data", "--model_dir", "model")),
    Script("poutyne", "examples/basic_random_classification.py", stop=40),
    Script("PyTorch-GAN", "implementations/wgan_gp/wgan_gp.py", data.beside_mnist, GAN),
    Script("PyTorch-GAN", "implementations/acgan/acgan.py", data.beside_mnist, GAN),
    Script(
        "efficient_densenet_pytorch",
        "demo.py",
        lambda at: data.small_images(at / "run" / "data" / "cifar-10-batches-py", 17),
        ("data", "out", "--depth", "10", "--n_epochs", "1", "--batch_size", "8", "--valid_size", "43", "--seed", "1"),
        ANY_CHECKSUM,
    ),
    Script(
        "pytorch-image-models",
        "train.py",
        lambda at: data.classes(at / "run" / "data", 14, 7, 40, ("train", "validation")),
        TIMM,
    ),
    Script("Informer2020", "main_informer.py", data.hours, INFORMER, OLD_NUMPY),
    Script(
        "CTC_pytorch", "timit/steps/train_ctc.py", data.utterances, ("--conf", "c.yaml"), NO_VISDOM, paths=("timit",)
    ),
    Script("deep-text-recognition-benchmark", "train.py", data.boxed_words, WORDS, OLD_TORCH),
]
