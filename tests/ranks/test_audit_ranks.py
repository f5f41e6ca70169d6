"""The audit on real ranks finds what differs between processes only."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import audit_parts as parts
import audit_setups as setups
import pytest
import quick
import torch.distributed as dist
from messages import assert_tells, raises
from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import audit
from ddp_patch.auditing import ranks
from ddp_patch.errors import InvalidOptionError


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the audit's ranks as those of other tests: without it each one imports torch."""
    monkeypatch.setattr(ranks, "run_ranks", quick.run_ranks)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("order", ["auto", "leader"])
def test_a_patched_loader_holds_on_real_ranks(order: Any) -> None:
    report = audit(loader(shuffle=True), 2, processes=True, order=order)
    assert report.ok
    assert report.epochs_differ
    assert "on real ranks" in report.how


def by_process_group(_rank: int, _world_size: int) -> DataLoader[Any]:
    """As a training makes its loader: it asks the process group which part of the data is its own."""
    return setups.subset_of_each_rank(dist.get_rank(), dist.get_world_size())


@pytest.mark.usefixtures("forked")
def test_a_factory_may_ask_the_process_group() -> None:
    """Also for a Subset of each rank: they are compared by the dataset below."""
    report = audit(by_process_group, 2, epochs=1, processes=True)
    assert report.ok
    assert (report.epochs[0].items, report.epochs[0].expected, report.epochs[0].missing) == ((52, 51), setups.N, 0)


PRINTING = """
import audit_setups
print("imported")
def by_set(rank, world_size):
    return audit_setups.by_set(rank, world_size)
"""


def test_the_order_of_a_set_of_strings_differs_between_processes_only(tmp_path: Path) -> None:
    """From the command line, where what the ranks print is not the report."""
    assert audit(setups.by_set, 2, epochs=1).ok
    file = tmp_path / "printing.py"
    file.write_text(PRINTING)
    command = [sys.executable, "-m", "ddp_patch", "audit", f"{file}:by_set", "--processes", "--format", "json"]
    command += ["--world-size", "2", "--epochs", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONUNBUFFERED", None)  # what ranks print is not lost where Python holds it back
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)  # noqa: S603 - ours
    (problem,) = json.loads(done.stdout)["by_set"]["problems"]
    assert problem["kind"] == "missing"
    assert "order='leader'" in problem["remedy"]
    assert done.stderr.count("imported") > 1
    assert done.returncode == 1


def test_what_cannot_be_sent_to_other_processes_is_refused() -> None:
    with raises(InvalidOptionError, ("processes=True", "<lambda>", "pickl"), "module"):
        audit(lambda rank, world_size: setups.torchs(rank, world_size), 2, processes=True)


def slice_by_process_group(_rank: int, _world_size: int) -> DataLoader[Any]:
    return parts.RIGHT["list"](dist.get_rank(), dist.get_world_size())


@pytest.mark.usefixtures("forked")
def test_slices_are_compared_by_value_on_real_ranks() -> None:
    assert audit(slice_by_process_group, 2, epochs=1, processes=True).ok


def cost_of_index(index: int) -> float:
    return 1.0 + index % 5


@pytest.mark.usefixtures("forked")
def test_real_ranks_are_balanced_as_simulated_ones_are() -> None:
    """By numbers, and by a function that other processes can import; another one is a reason not to."""
    given = loader(batch_size=2, shuffle=True)
    simulated = audit(given, 2, epochs=1, cost=cost_of_index, seed=0)
    real = audit(given, 2, epochs=1, cost=cost_of_index, processes=True)
    assert simulated.balanced is not None
    assert real.balanced is not None
    assert real.ok
    assert real.epochs == simulated.epochs
    assert real.balanced.epochs == simulated.balanced.epochs
    private = audit(given, 2, epochs=1, cost=lambda index: cost_of_index(index), processes=True)
    assert private.epochs == real.epochs
    assert private.why_not_balanced is not None
    assert_tells(private.why_not_balanced, ("pickling", "processes=True"), ("functions of a module", "numbers"))
