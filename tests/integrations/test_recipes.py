"""The recipes of docs/recipes.md evaluate as one process does, and take each sample once where they stop and go on.

Each trains on one rank, then on another number of ranks, where it stops within an epoch, and goes on from there on two.
And each is stopped while it validates, and goes on with that.
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documented import CHECKOUT
from quick import run_ranks
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

FOLDER = CHECKOUT / "docs" / "examples" / "recipes"
SETTINGS = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TORCHELASTIC_RUN_ID": "tests"}
EPOCHS = 3


class StoppedError(Exception):
    """Ends a training."""


@dataclass
class Trained:
    """What a rank saw of a training.

    Attributes:
        stop_after: How many steps it takes before it stops; None: all.
        stop_in: In its how manieth validation it stops, from 1; None: in none.
        steps: Each step's samples; texts without those that are padding.
        validations: How many it has begun.
        metrics: What it printed after each.
        states: The network's parameters then.
    """

    stop_after: int | None
    stop_in: int | None
    steps: list[list[bytes]] = field(default_factory=list)
    validations: int = 0
    metrics: list[Any] = field(default_factory=list)
    states: Mapping[str, Tensor] = field(default_factory=dict)

    def step(self, samples: list[Tensor]) -> None:
        if len(self.steps) == self.stop_after:
            raise StoppedError
        self.steps.append([sample.numpy().tobytes() for sample in samples])

    def image_step(self, network: nn.Module, given: Any) -> None:
        if isinstance(network, nn.Sequential) and torch.is_grad_enabled():
            self.step(list(given[0]))

    def validate(self) -> None:
        self.validations += 1
        if self.validations == self.stop_in:
            raise StoppedError

    def evaluated(self, network: nn.Module, metrics: Any) -> Any:
        self.metrics.append(metrics)
        self.states = {name: value.clone() for name, value in network.state_dict().items()}
        return metrics


def recipe(name: str) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return import_module(name)


def train(
    rank: int, world_size: int, name: str, path: Path, stop_after: int | None = None, stop_in: int | None = None
) -> Trained:
    os.environ |= SETTINGS
    torch.manual_seed(rank)
    # In bfloat16 the parameters would differ by its rounding; in float32 they can be compared.
    torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[misc, assignment]
    trained = Trained(stop_after, stop_in)
    hook = register_module_forward_pre_hook(trained.image_step)
    module = recipe(name)
    if stop_in is not None:
        module.STEPS_PER_CHECKPOINT = 1
    if name == "vision":
        module.BATCH_SIZE = 63  # which two ranks do not divide
    if name == "stream":
        import datasets

        datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # else workers wait for 5 s after their last file
    with suppress(StoppedError):
        if name == "lightning_metrics":
            train_with_lightning(module, world_size, path, trained)
        else:
            record_validations(module, trained)
            if name == "text":
                record_texts(module, trained)
            module.main(path)
    hook.remove()
    return trained


def record_validations(module: Any, trained: Trained) -> None:
    validate = module.validate

    def validate_recorded(network: Any, loader: Any) -> Any:
        trained.validate()
        return trained.evaluated(network, validate(network, loader))

    module.validate = validate_recorded


def train_with_lightning(module: Any, devices: int, path: Path, trained: Trained) -> None:
    if devices == 1:
        dist.destroy_process_group()  # Lightning makes none
    trainers: list[Any] = []
    trainer = module.Trainer

    def kept_trainer(**options: Any) -> Any:
        trainers.append(trainer(**options))
        return trainers[0]

    class Recorded(module.Classifier):  # type: ignore[misc]  # the recipe's
        def on_validation_epoch_start(self) -> None:
            if not self.trainer.sanity_checking:
                trained.validate()

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                trained.evaluated(self, {name: float(value) for name, value in self.metrics.compute().items()})

    module.Trainer, module.Classifier = kept_trainer, Recorded
    if trained.stop_in is not None:
        kept = module.ModelCheckpoint
        module.ModelCheckpoint = lambda folder, **_: kept(folder, every_n_train_steps=1, save_last=True)
    module.main(devices, path)


def record_texts(module: Any, trained: Trained) -> None:
    take_step = module.take_step

    def take_recorded_step(model: Any, optimizer: Any, group: Any) -> None:
        trained.step([text[text > 0] for (texts, _), mask in group for text in texts[mask]])
        take_step(model, optimizer, group)

    module.take_step = take_recorded_step


def taken(ranks: list[Trained], steps: int | None = None) -> Counter[bytes]:
    return Counter(sample for rank in ranks for step in rank.steps[:steps] for sample in step)


@torch.no_grad()
def evaluated_alone(name: str, path: Path, states: Mapping[str, Tensor]) -> Any:
    """Evaluate a network in a single process, with the loader as it is."""
    module = recipe(name)
    made = {"text": "Network", "lightning_metrics": "Classifier"}.get(name, "make_network")
    network = getattr(module, made)()
    network.load_state_dict(states)
    _, loader = module.make_loaders(path) if name == "stream" else module.make_loaders()
    if name != "lightning_metrics":
        return module.validate(network, loader)
    for images, labels in loader:
        network.metrics.update(network.network(images), labels)
    return {name: float(value) for name, value in network.metrics.compute().items()}


# The steps taken before it stops, those of them that the last checkpoint holds, and on how many ranks it stops. And how
# many samples two ranks repeat: one of each batch; of the 57 batches of texts one, which is left out here; a batch.
CASES = [
    ("vision", 29, 20, 1, EPOCHS * 24),
    ("text", 13, 10, 1, 0),
    ("stream", 17, 10, 2, EPOCHS * 16),
    ("lightning_metrics", 25, 20, 1, 0),
]


@pytest.mark.parametrize(("name", "stop_after", "kept", "ranks", "most_padding"), CASES)
def test_a_recipe(name: str, stop_after: int, kept: int, ranks: int, most_padding: int, tmp_path: Path) -> None:
    paths = [tmp_path / "whole", tmp_path / "stopped"]
    if name == "stream":
        for path in paths:
            path.mkdir()
    whole = run_ranks(train, 1, name, paths[0])
    stopped = run_ranks(train, ranks, name, paths[1], stop_after)
    assert {len(rank.steps) for rank in stopped} == {stop_after}
    resumed = run_ranks(train, 2, name, paths[1])

    given, expected = taken(stopped, kept) + taken(resumed), taken(whole)
    assert expected - given == Counter()
    assert (given - expected).total() <= most_padding
    assert resumed[0].metrics == resumed[1].metrics
    for trained, path in [(whole[0], paths[0]), (resumed[0], paths[1])]:
        assert trained.metrics[-1] == evaluated_alone(name, path, trained.states)
    if name != "stream":
        for parameter, value in whole[0].states.items():
            torch.testing.assert_close(value, resumed[0].states[parameter], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [name for name, *_ in CASES])
def test_stopped_while_it_validates_a_recipe_validates_and_goes_on(name: str, tmp_path: Path) -> None:
    """After the second epoch; its last checkpoint is that of the epoch's last step."""
    paths = [tmp_path / "whole", tmp_path / "stopped"]
    if name == "stream":
        for path in paths:
            path.mkdir()
    whole = run_ranks(train, 2, name, paths[0])
    stopped = run_ranks(train, 2, name, paths[1], None, 2)
    resumed = run_ranks(train, 2, name, paths[1])
    for once, first, rest in zip(whole, stopped, resumed, strict=True):
        assert first.steps + rest.steps == once.steps
        assert first.metrics + rest.metrics == once.metrics
        assert (len(first.metrics), len(once.metrics)) == (1, EPOCHS)
        torch.testing.assert_close(rest.states, once.states, rtol=0, atol=0)


def test_no_recipe_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {name for name, *_ in CASES}
