"""Judges of programs: ``benchmarks/same.py`` shows one that differs, and that of users' sees what is lost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Epoch, Run, verdict

import ddp_patch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "same.py"
TREE = Path(ddp_patch.__file__).parents[1]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test's run keeps what the tree gives, for the second one."""
    return tmp_path_factory.mktemp("kept")


def compared(after: Path, kept: Path, before: Path = TREE) -> subprocess.CompletedProcess[str]:
    arguments = ["--before", str(before), "--after", str(after), "--programs", "20", "--jobs", "1"]
    environment = {**os.environ, "TMPDIR": str(kept)}
    return subprocess.run(  # noqa: S603 - this very Python
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.soak  # as below
def test_a_program_that_differs_is_shown(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(TREE / "ddp_patch", tmp_path / "ddp_patch", ignore=shutil.ignore_patterns("__pycache__"))
    plan = tmp_path / "ddp_patch" / "positions_and_padding.py"
    right, wrong = "range(self.rank, total, self.num_replicas)", "range(0, total, self.num_replicas)"
    assert plan.read_text().count(right) == 1
    plan.write_text(plan.read_text().replace(right, wrong))
    ran = compared(tmp_path, kept)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "of seed 0 differs" in ran.stdout
    assert {"-", "+"} <= {line[:1] for line in ran.stdout.splitlines()}


def test_a_folder_without_the_package_is_refused(kept: Path, tmp_path: Path) -> None:
    ran = compared(tmp_path, kept)
    assert (ran.returncode, "holds no ddp_patch" in ran.stderr) == (2, True)


# The judge of users' programs sees what is lost.


def epoch(*samples: int, steps: int = 1) -> Epoch:
    return Epoch([*range(4)], samples=[*samples], steps=steps)


WHOLE, LOST, UNEVEN = [epoch(0, 1), epoch(2, 3)], [epoch(0, 1), epoch(2, 2)], [epoch(0, 1), epoch(2, 3, steps=2)]
OF_EPOCH_0 = "lost in silence: epoch 0: 0 of 4 lost, 0 too many, steps [1, 2]"


@pytest.mark.parametrize(
    ("epochs", "error", "came"),
    [
        ([WHOLE], "", "complete"),
        ([WHOLE, LOST], "", "lost in silence: epoch 1: 1 of 4 lost, 1 too many, steps [1, 1]"),
        ([UNEVEN], "", OF_EPOCH_0),
        ([WHOLE, LOST], "RankMismatchError", "error"),
        ([UNEVEN, WHOLE], "RankMismatchError", f"{OF_EPOCH_0}; error in epoch 1"),
    ],
)
def test_the_judge_sees_what_is_lost(epochs: list[list[Epoch]], error: str, came: str) -> None:
    runs = [Run([ranks[rank] for ranks in epochs], error=error if rank else "") for rank in range(2)]
    assert verdict(runs) == came


ENDED, OWED = Run([epoch(2, 3)]), Run([epoch(0, 1)], owed="rank 0 validated alone")


@pytest.mark.parametrize(
    ("runs", "came"),
    [
        ([Run([epoch(0, 1)], is_stuck=True), ENDED], "lost in silence: ranks wait for others that have ended"),
        ([Run(failed="KeyError: 1"), ENDED], "failed: KeyError: 1"),
        ([OWED, ENDED], "lost in silence: rank 0 validated alone"),
        ([OWED, Run([epoch(2, 3)], error="RankMismatchError")], "error"),
    ],
)
def test_the_judge_sees_who_waits_or_fails_or_has_to_raise(runs: list[Run], came: str) -> None:
    assert verdict(runs) == came
