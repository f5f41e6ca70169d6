"""The script of docs/resume.md that stops early does so after the same epoch, wherever it was stopped before."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import early_stopping
import pytest
import torch
from quick import run_ranks
from torch import nn
from torch.utils.data import DataLoader


class StoppedError(Exception):
    """Ends a training."""


def train(rank: int, world_size: int, folder: Path, stop_in: int | None = None) -> list[float]:
    """Return the losses of all validations; stop in the beginning of one, counted from 1."""
    torch.manual_seed(rank)
    losses = list[float]()
    validate = early_stopping.validate

    def validate_recorded(network: nn.Module, loader: DataLoader[Any]) -> float:
        if len(losses) + 1 == stop_in:
            raise StoppedError
        losses.append(validate(network, loader))
        return losses[-1]

    early_stopping.validate = validate_recorded
    with suppress(StoppedError):
        early_stopping.main(folder)
    return losses


@pytest.mark.parametrize("stop_in", [1, 9])  # 9: where patience has begun to run out
def test_stopped_while_it_validates_a_training_validates_and_counts_no_epoch_twice(
    stop_in: int, tmp_path: Path
) -> None:
    paths = [tmp_path / "whole", tmp_path / "stopped"]
    for path in paths:
        path.mkdir()
    whole = run_ranks(train, 2, paths[0])
    assert whole[0] == whole[1]
    best = min(whole[0])
    assert len(whole[0]) == whole[0].index(best) + 1 + early_stopping.PATIENCE < early_stopping.EPOCHS
    first = run_ranks(train, 2, paths[1], stop_in)
    rest = run_ranks(train, 2, paths[1])
    assert [one + other for one, other in zip(first, rest, strict=True)] == whole
