"""torchmetrics of gathered outputs are those of one process to the last bit; with padding left in they are not."""

from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from documented import CHECKOUT
from quick import run_ranks, run_script, soaked
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from zoo import seed_ambient

from ddp_patch import gather_in_order, iter_with_mask, patch_dataloader_to_ddp

Outputs: TypeAlias = dict[str, torch.Tensor]
OnRank: TypeAlias = tuple[Outputs, Outputs, list[int]]

SEED = 3


def loader_of(outputs: Outputs, shuffle: bool) -> DataLoader[Any]:
    """A loader over what a classifier says of each sample, and the labels."""
    generator = torch.Generator().manual_seed(SEED) if shuffle else None
    return DataLoader(TensorDataset(*outputs.values()), batch_size=50, shuffle=shuffle, generator=generator)


def outputs_of(loader: Any) -> Outputs:
    logits, labels = zip(*loader, strict=True)
    return {"logits": torch.cat(logits), "labels": torch.cat(labels)}


def on_rank(rank: int, world_size: int, outputs: Outputs) -> list[OnRank]:
    """Not shuffled, and shuffled."""
    return [_evaluated(rank, loader_of(outputs, shuffle)) for shuffle in (False, True)]


def _evaluated(rank: int, given: DataLoader[Any]) -> OnRank:
    """What was gathered, what this rank put in, and how many of its samples a metric computed in place had right."""
    seed_ambient(SEED + rank)
    loader = patch_dataloader_to_ddp(given)
    own = outputs_of(loader)
    gathered = gather_in_order(own, loader)
    right = torch.zeros(2, dtype=torch.int64)
    for (logits, labels), mask in iter_with_mask(loader):
        right += torch.stack([(logits.argmax(dim=1) == labels)[mask].sum(), mask.sum()])
    dist.all_reduce(right)
    return gathered, own, right.tolist()


@cache
def digits() -> Outputs:
    """The 1797 digits, with what an imperfect classifier says of each: its distance to each mean, and noise."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    means = torch.stack([images[labels == label].mean(dim=0) for label in range(10)])
    noise = torch.randn(len(labels), 10, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    return {"logits": (noise - torch.cdist(images, means) / 8).float(), "labels": labels}


def metrics() -> dict[str, Any]:
    from torchmetrics.classification import (  # not on ranks
        MulticlassAccuracy,
        MulticlassAUROC,
        MulticlassAveragePrecision,
    )

    kinds = {"accuracy": MulticlassAccuracy, "AUROC": MulticlassAUROC, "mAP": MulticlassAveragePrecision}
    return {name: kind(num_classes=10) for name, kind in kinds.items()}


def metrics_of(outputs: Outputs) -> dict[str, float]:
    return {name: float(metric(*outputs.values())) for name, metric in metrics().items()}


def batch_by_batch(loader: DataLoader[Any]) -> dict[str, float]:
    """As one process does it, with the unpatched loader."""
    made = metrics()
    for batch in loader:
        for metric in made.values():
            metric.update(*batch)
    return {name: float(metric.compute()) for name, metric in made.items()}


@pytest.mark.parametrize("world_size", [soaked(3), 4])  # three divide the samples
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
    padded, padding = metrics_of(together), -1797 % world_size
    assert len(together["labels"]) == 1797 + padding
    for name in expected:
        assert 0.1 < expected[name] < 0.999  # a classifier whose metrics can change
        assert (abs(padded[name] - expected[name]) > 1e-6) == bool(padding)


def test_a_metric_that_is_updated_in_each_step_is_that_of_one_process(tmp_path: Path) -> None:
    assert "as in one process" in run_script(tmp_path, 3, str(CHECKOUT / "docs" / "examples" / "step_metrics.py"))
