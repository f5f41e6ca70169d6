"""The audit on real ranks finds what differs between processes only."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import audit_setups as setups
import pytest
from click.testing import CliRunner
from torch.utils.data import DataLoader, DistributedSampler
from zoo import loader

from ddp_patch import InvalidOptionError, audit
from ddp_patch.auditing.commands import commands


def test_a_patched_loader_holds_on_real_ranks() -> None:
    report = audit(loader(shuffle=True), 2, processes=True)
    assert report.ok
    assert report.seeds_agree
    assert "on real ranks" in report.how


def test_the_order_of_a_set_of_strings_differs_between_processes_only() -> None:
    assert audit(setups.by_set, 2, epochs=1).ok
    report = audit(setups.by_set, 2, epochs=1, processes=True)
    assert [problem.kind for problem in report.problems] == ["ranks_disagree"]
    assert "agreement='leader'" in report.problems[0].remedy


def test_what_a_leader_sends_is_audited_on_real_ranks() -> None:
    report = audit(loader(shuffle=True), 2, processes=True, agreement="leader")
    assert report.ok
    assert report.epochs_differ


def by_process_group(_rank: int, _world_size: int) -> DataLoader[Any]:
    """As a training makes its loader: torch's sampler asks the process group."""
    return setups.loader(DistributedSampler(setups.Untouchable(), shuffle=False))


def test_a_factory_may_ask_the_process_group() -> None:
    report = audit(by_process_group, 2, processes=True)
    assert report.ok
    assert report.epochs[0].items == (52, 52)
    assert report.epochs[0].expected == setups.N


def test_a_subset_of_each_rank_is_compared_by_the_dataset_below() -> None:
    report = audit(setups.subset_of_each_rank, 2, epochs=1, processes=True)
    assert report.ok
    assert (report.epochs[0].items, report.epochs[0].missing) == ((52, 51), 0)


def test_from_the_command_line() -> None:
    command = ["audit", f"{setups.__file__}:by_set", "--world-size", "2", "--epochs", "1", "--processes"]
    done = CliRunner().invoke(commands, command)
    assert "✘ ranks_disagree" in done.output
    assert "on real ranks" in done.output
    assert done.exit_code == 1


PRINTING = """
import audit_setups
print("imported")
def by_set(rank, world_size):
    return audit_setups.by_set(rank, world_size)
"""


def test_what_ranks_print_is_not_the_report(tmp_path: Path) -> None:
    file = tmp_path / "printing.py"
    file.write_text(PRINTING)
    command = [sys.executable, "-m", "ddp_patch", "audit", f"{file}:by_set", "--processes", "--format", "json"]
    command += ["--world-size", "2", "--epochs", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)  # noqa: S603 - ours
    assert json.loads(done.stdout)["by_set"]["problems"][0]["kind"] == "ranks_disagree"
    assert done.stderr.count("imported") > 1


def test_what_cannot_be_sent_to_other_processes_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="processes=True sends what it audits"):
        audit(lambda rank, world_size: setups.torchs(rank, world_size), 2, processes=True)
