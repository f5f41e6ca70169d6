"""torchmetrics of gathered outputs are those of one process to the last bit; with padding left in they are not."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluated import SEED, OnRank, Outputs, loader_of, on_rank, outputs_of
from quick import run_ranks, soaked
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassAveragePrecision

METRICS = {"accuracy": MulticlassAccuracy, "AUROC": MulticlassAUROC, "mAP": MulticlassAveragePrecision}


@cache
def digits() -> Outputs:
    """The 1797 digits, with what an imperfect classifier says of each: its distance to each mean, and noise."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    means = torch.stack([images[labels == label].mean(dim=0) for label in range(10)])
    noise = torch.randn(len(labels), 10, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return {"logits": (noise - torch.cdist(images, means) / 8).float(), "labels": labels}


def metrics_of(outputs: Outputs) -> dict[str, float]:
    return {name: float(metric(num_classes=10)(*outputs.values())) for name, metric in METRICS.items()}


def batch_by_batch(loader: DataLoader[Any]) -> dict[str, float]:
    """As one process does it, with the unpatched loader."""
    metrics = {name: metric(num_classes=10) for name, metric in METRICS.items()}
    for batch in loader:
        for metric in metrics.values():
            metric.update(*batch)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


@pytest.mark.parametrize("world_size", [1, soaked(2), 3, soaked(4), soaked(5)])
def test_metrics_are_those_of_one_process(world_size: int) -> None:
    ranks = run_ranks(on_rank, world_size, digits())
    for shuffle in (False, True):
        require_those_of_one_process([each[shuffle] for each in ranks], world_size, shuffle)


def require_those_of_one_process(ranks: list[OnRank], world_size: int, shuffle: bool) -> None:
    alone, expected = outputs_of(loader_of(digits(), shuffle)), batch_by_batch(loader_of(digits(), shuffle))
    for gathered, _, right in ranks:
        assert all(torch.equal(gathered[name], alone[name]) for name in alone)
        assert metrics_of(gathered) == expected
        assert right[1] == 1797
        assert right[0] == int((alone["logits"].argmax(dim=1) == alone["labels"]).sum())
    together = {name: torch.cat([own[name] for _, own, _ in ranks]) for name in alone}
    padded = metrics_of(together)
    padding = -1797 % world_size
    assert len(together["labels"]) == 1797 + padding
    print(f"{world_size} ranks, {padding} repeated:", {name: padded[name] - expected[name] for name in padded})
    for name in METRICS:
        assert 0.1 < expected[name] < 0.999  # a classifier whose metrics can change
        assert (abs(padded[name] - expected[name]) > 1e-6) == bool(padding)


def test_a_metric_that_is_updated_in_each_step_is_that_of_one_process() -> None:
    script = Path(__file__).parents[2] / "docs" / "examples" / "step_metrics.py"
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([sys.executable, *run], capture_output=True, text=True, timeout=240, env=environment)  # noqa: S603 - our own script
    assert done.returncode == 0, done.stderr
    assert "as in one process" in done.stdout
