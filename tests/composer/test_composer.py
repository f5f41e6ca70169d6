"""Composer's Trainer with patched loaders: the script of docs/frameworks.md, and what its bullets say."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Callback, ComposerModel, Evaluator, Trainer
from composer.utils import dist
from documented import CHECKOUT, run_command, run_on_twins
from quick import run_ranks
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader

pytestmark = pytest.mark.filterwarnings("ignore")  # of CPUs, of small data, and of torch's own ways by older names
SCRIPT = CHECKOUT / "docs" / "examples" / "frameworks" / "composer_trainer.py"
N, SIZE, RANKS, BATCHES = 66, 4, 2, 3  # samples, of a batch, ranks, batches before the checkpoint
TAKEN = BATCHES * RANKS * SIZE
SAVING = {"save_filename": "ba{batch}.pt", "save_interval": f"{BATCHES}ba"}


@pytest.fixture(autouse=True)
def _node(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Composer's own launcher does; torchrun sets no such variable."""
    monkeypatch.setenv("NODE_RANK", "0")


class Model(ComposerModel):  # type: ignore[misc]  # checked without Composer
    """Notes the samples that it is trained on, and averages those that it is asked to validate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained: list[int] = []
        self.mean = MeanMetric()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.trained += batch[:, 0].int().tolist()
        return batch * self.weight

    def loss(self, outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean()

    def get_metrics(self, is_train: bool = False) -> dict[str, MeanMetric]:
        return {} if is_train else {"mean": self.mean}

    def update_metric(self, batch: torch.Tensor, _: torch.Tensor, metric: MeanMetric) -> None:
        metric.update(batch)


class Position(Callback):  # type: ignore[misc]  # as the script's
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> Any:
        return loader_state(self.loader)

    def load_state_dict(self, state: Any) -> None:
        restore_loader(self.loader, state)


def numbers_of(n: int, *, shuffle: bool) -> Any:
    numbers: Any = torch.arange(float(n))[:, None]
    return DataLoader(numbers, SIZE, shuffle=shuffle)


def trainer_of(loader: Any, duration: str, **options: Any) -> tuple[Model, Any]:
    dist.initialize_dist("cpu")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options |= {"progress_bar": False, "optimizers": optimizer}
    return model, Trainer(
        model=model, train_dataloader=loader, max_duration=duration, device="cpu", run_name="run", **options
    )


def train(rank: int, world_size: int, folder: str, epochs: int, resumes: bool) -> list[int]:
    """Train and save each three batches, or go on from the first checkpoint; return this rank's samples."""
    dist.initialize_dist("cpu")
    loader = patch_dataloader_to_ddp(numbers_of(N, shuffle=True), seed=3)
    saving = SAVING | {"save_folder": folder}
    options = {"load_path": f"{folder}/ba{BATCHES}.pt"} if resumes else saving
    duration = f"{epochs}ep" if resumes or epochs > 1 else f"{BATCHES}ba"
    model, trainer = trainer_of(loader, duration, callbacks=[Position(loader)], spin_dataloaders=False, **options)
    trainer.fit()
    return model.trained


@pytest.mark.parametrize(
    ("launch", "launcher"), [(run_command, "composer -n 2"), (run_on_twins, "torchrun --standalone --nproc-per-node 2")]
)
def test_the_script_of_the_page_trains_and_resumes(launch: Callable[[str], Any], launcher: str, tmp_path: Path) -> None:
    for argument in ("", "checkpoints/ba3.pt"):
        status, _, error = launch(f"cd {tmp_path} && {launcher} {SCRIPT} {argument}")
        assert status == 0, error
        assert (tmp_path / "checkpoints" / "ba18.pt").exists()
        (tmp_path / "checkpoints" / "ba18.pt").unlink()  # the resumed one writes it again


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_goes_on_with_the_next_batch_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    before = [*chain(*run_ranks(train, RANKS, str(tmp_path), 1, False))]
    after = [*chain(*run_ranks(train, ranks, str(tmp_path), 1, True))]
    assert len(before) == TAKEN
    assert {*before, *after} == set(range(N))
    assert len(after) - (N - TAKEN) in range(ranks)  # but for padding


def test_a_resumed_training_is_the_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = run_ranks(train, RANKS, str(tmp_path), 2, False)
    resumed = run_ranks(train, RANKS, str(tmp_path), 2, True)
    assert resumed == [samples[BATCHES * SIZE :] for samples in whole]


def spun(rank: int, world_size: int, folder: str, load_path: str | None) -> list[int]:
    dist.initialize_dist("cpu")
    loader = patch_dataloader_to_ddp(numbers_of(N, shuffle=True), seed=3)
    saving = SAVING | {"save_folder": folder}
    model, trainer = trainer_of(loader, "2ep", load_path=load_path, **saving)
    trainer.fit()
    return model.trained


def test_without_the_callback_the_same_ranks_read_again_what_they_had(tmp_path: Path) -> None:
    whole = run_ranks(spun, RANKS, str(tmp_path / "whole"), None)
    resumed = run_ranks(spun, RANKS, str(tmp_path / "resumed"), str(tmp_path / "whole" / f"ba{BATCHES}.pt"))
    assert resumed == [samples[BATCHES * SIZE :] for samples in whole]


def validate(rank: int, world_size: int, n: int) -> list[float]:
    dist.initialize_dist("cpu")
    train_loader, first, second = patch_dataloader_to_ddp(
        [numbers_of(N, shuffle=True), numbers_of(n, shuffle=False), numbers_of(n + 2, shuffle=True)]
    )
    found: list[float] = []
    evaluators = [Evaluator(label=f"{each}", dataloader=loader) for each, loader in enumerate((first, second))]
    _, trainer = trainer_of(train_loader, "2ep", eval_dataloader=evaluators, eval_interval="1ep")
    trainer.fit()
    for metrics in trainer.state.eval_metrics.values():
        found += [float(metric.compute()) for metric in metrics.values()]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("n", [24, 25, 26])
def test_evaluators_average_each_sample_once(n: int, ranks: int) -> None:
    for found in run_ranks(validate, ranks, n):
        assert found == pytest.approx([(n - 1) / 2, (n + 1) / 2])
