"""Unedited scripts of one process on several real ranks: every rank ends with the model of one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick import run_ranks, soaked
from scripts_of_one import SCRIPTS, run

from ddp_patch import autopatch


def results(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    own = folder / f"rank-{rank}"
    own.mkdir()
    found = {}
    for name in SCRIPTS:
        with autopatch(as_one_process=True):
            found[name] = run(name, own, folder)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_ranks(results, 1, tmp_path_factory.mktemp("alone"))
    return found


@pytest.mark.parametrize("world_size", [2, 3, soaked(4)])
def test_every_rank_ends_with_the_model_of_one_rank(world_size: int, tmp_path: Path, alone: dict[str, Any]) -> None:
    ranks = run_ranks(results, world_size, tmp_path)
    for name in SCRIPTS:
        near = 1e-4 if "float32" in name else 1e-9
        for of_rank in ranks:
            for found, wanted in zip(of_rank[name]["parameters"], alone[name]["parameters"], strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=near, err_msg=name)
            np.testing.assert_allclose(of_rank[name]["history"], alone[name]["history"], rtol=near, err_msg=name)
